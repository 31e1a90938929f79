//! Names that clients give to messages (`Idempotency-Key`), so that they may send them again.
//!
//! A name is reserved before the message is looked at: whoever is first decides which turn it is, and everybody
//! after it sends that same turn, which task-store takes once. A message that is refused leaves the name with its
//! identity, so it may be sent again under it. Names are forgotten some time after their first use.

use prost::Message as _;
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{Idempotency, Scope};
use rialto_store::{Batch, Check, Error as KernelError, Millis, Op, Shard};

use crate::{
    keys,
    store::{Store, corrupt, failed},
    stored::Reservation,
};

/// Reads and writes for one name before giving up. Each conflict means that somebody else reserved it.
const TRIES: usize = 8;

impl Store {
    /// The identity of the message with this name: the wanted one, or the one of whoever was first.
    ///
    /// # Errors
    /// [`Kind::IdempotencyKeyReused`] when that was another message.
    pub(crate) async fn reserve(
        &self,
        scope: &Scope,
        named: &Idempotency,
        wanted: Reservation,
        keep: Millis,
    ) -> Result<Reservation, Error> {
        let (shard, key) = keys::reservation(scope, &named.key, self.engine.shards());
        for _ in 0..TRIES {
            let now = self.engine.now();
            let record = self.records(shard, &[&key]).await?.pop().flatten();
            let version = record.as_ref().map(|record| record.version);
            let found = record.map(|record| Reservation::decode(record.bytes).map_err(corrupt)).transpose()?;
            let was = match found {
                Some(found) if found.expires_ms > now => {
                    return match found.fingerprint == wanted.fingerprint {
                        true => Ok(found),
                        false => Err(Kind::IdempotencyKeyReused.into()),
                    };
                }
                found => found.map(|expired| expired.expires_ms),
            };
            let reserved = Reservation { expires_ms: now + keep, ..wanted.clone() };
            let check = Check::unchanged(key.as_str(), version);
            let row =
                Op::Index { index: keys::DUE.to_owned(), member: key.clone(), was, now: Some(reserved.expires_ms) };
            let ops = vec![Op::Put { key: key.clone(), bytes: reserved.encode_to_vec().into() }, row];
            match self.engine.commit(Batch { shard, checks: vec![check], ops, ..Batch::default() }).await {
                Ok(_) => return Ok(reserved),
                Err(KernelError::Conflict { .. }) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Err(Error::unavailable())
    }

    /// Forgets names, given as rows of the index of what is due.
    pub(crate) async fn forget_names(&self, shard: Shard, rows: &[(Millis, &str)]) -> Result<(), Error> {
        let keys: Vec<&str> = rows.iter().map(|(_, key)| *key).collect();
        let now = self.engine.now();
        let mut batch = Batch { shard, releasing: true, ..Batch::default() };
        for ((score, key), record) in rows.iter().zip(self.records(shard, &keys).await?) {
            let key = || (*key).to_owned();
            match record {
                Some(record) => {
                    let expires = Reservation::decode(record.bytes).map_or(0, |reserved| reserved.expires_ms);
                    if expires > now {
                        continue;
                    }
                    batch.checks.push(Check::Version { key: key(), version: record.version });
                    batch.ops.push(Op::Delete { key: key() });
                }
                None => batch.checks.push(Check::Absent { key: key() }),
            }
            batch.ops.push(Op::Index { index: keys::DUE.to_owned(), member: key(), was: Some(*score), now: None });
        }
        if batch.ops.is_empty() {
            return Ok(());
        }
        match self.engine.commit(batch).await {
            // Another replica did it, or somebody uses one of them again: what is left is found again.
            Ok(_) | Err(KernelError::Conflict { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }
}
