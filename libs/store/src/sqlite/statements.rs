//! The statements of the writer, prepared once.

use rusqlite::{Connection, Statement};

macro_rules! statements {
    ($($name:ident: $text:literal,)*) => {
        /// One field per statement.
        #[derive(Debug)]
        pub(super) struct Statements<'c> {
            $(pub(super) $name: Statement<'c>,)*
        }

        impl<'c> Statements<'c> {
            pub(super) fn prepare(conn: &'c Connection) -> rusqlite::Result<Self> {
                Ok(Self { $($name: conn.prepare($text)?,)* })
            }
        }
    };
}

statements! {
    begin: "BEGIN IMMEDIATE",
    commit: "COMMIT",

    record: "SELECT version, meta FROM records WHERE shard = ?1 AND key = ?2",
    put_record: "REPLACE INTO records(shard, key, version, meta, bytes) VALUES(?1, ?2, ?3, ?4, ?5)",
    put_meta: "UPDATE records SET meta = ?3 WHERE shard = ?1 AND key = ?2",
    delete_record: "DELETE FROM records WHERE shard = ?1 AND key = ?2",

    index: "SELECT id, members FROM indexes WHERE shard = ?1 AND name = ?2",
    put_index: "REPLACE INTO indexes(shard, name, id, members) VALUES(?1, ?2, ?3, ?4)",
    delete_index: "DELETE FROM indexes WHERE shard = ?1 AND name = ?2",
    reserve_ids: "UPDATE meta SET value = ?1 WHERE name = 'next_index'",
    put_member: "INSERT OR IGNORE INTO members(id, score, member) VALUES(?1, ?2, ?3)",
    delete_member: "DELETE FROM members WHERE id = ?1 AND score = ?2 AND member = ?3",

    tail: "SELECT ms, seq FROM entries WHERE shard = ?1 AND stream = ?2 ORDER BY ms DESC, seq DESC LIMIT 1",
    count_entries: "SELECT count(*) FROM entries WHERE shard = ?1 AND stream = ?2",
    put_stream: "REPLACE INTO streams(shard, name, ms, seq, entries) VALUES(?1, ?2, ?3, ?4, ?5)",
    delete_stream: "DELETE FROM streams WHERE shard = ?1 AND name = ?2",
    put_entry: "INSERT INTO entries(shard, stream, ms, seq, tag, deliveries, payload) VALUES(?1, ?2, ?3, ?4, ?5, 0, ?6)",
    entry: "SELECT ms, seq, tag, payload FROM entries WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",
    delete_entry: "DELETE FROM entries WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",
    delete_entries: "DELETE FROM entries WHERE shard = ?1 AND stream = ?2",
    put_deliveries: "UPDATE entries SET deliveries = ?5 WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",

    put_delayed: "REPLACE INTO delayed(shard, stream, id, due, tag, payload) VALUES(?1, ?2, ?3, ?4, ?5, ?6)",
    delete_delayed: "DELETE FROM delayed WHERE shard = ?1 AND stream = ?2 AND id = ?3",
    due: "SELECT id, tag, payload FROM delayed WHERE shard = ?1 AND stream = ?2 AND due <= ?3 ORDER BY due, id LIMIT ?4",
    next_due: "SELECT min(due) FROM delayed WHERE shard = ?1 AND stream = ?2",

    full_at: "SELECT full_at FROM limits WHERE shard = ?1 AND key = ?2",
    put_full_at: "REPLACE INTO limits(shard, key, full_at) VALUES(?1, ?2, ?3)",
    sweep_limits: "DELETE FROM limits WHERE full_at < ?1",
}
