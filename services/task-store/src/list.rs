//! ListTasks (spec §3.1.4): pages of an index, merged over the shards.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use aws_lc_rs::{hmac, rand};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use futures::{
    StreamExt as _,
    future::{try_join, try_join_all},
    stream,
};
use prost::Message as _;
use rialto_a2a::{
    Error,
    v1::{ListTasksRequest, ListTasksResponse, Task, TaskState},
    wkt::Timestamp,
};
use rialto_rpc::tasks::Scope;
use rialto_store::{Batch, Check, Error as KernelError, IndexQuery, Op, Order, Shard};
use tokio::time::Instant;

use crate::{
    keys::{self, ScopeKey, TaskId, TurnId},
    read::Shape,
    store::{Store, failed},
    stored::Head,
};

/// Tasks of a page when the caller does not say (spec §3.1.4).
const PAGE: usize = 50;

/// Tasks of the largest page (spec §3.1.4).
const MAX_PAGE: i32 = 100;

/// Bytes after which a page ends early: a page of large tasks must still be deliverable.
const PAGE_BYTES: usize = 4 << 20;

/// Tasks that are read at the same time.
const AT_ONCE: usize = 8;

/// Bytes of the seal that a token carries.
const SEAL: usize = 16;

/// How long a key is believed.
const KEY_AGE: Duration = Duration::from_secs(60);

/// Place of a task in a list.
type Cursor = (i64, TaskId);

/// Seals page tokens, so that nobody can make one up or use one with another filter or owner. The key is in the
/// store: all replicas have the same, and it outlives them.
#[derive(Debug, Default)]
pub(crate) struct Seal {
    key: Mutex<Option<(hmac::Key, Instant)>>,
}

impl Seal {
    /// The key, as it was read no longer ago than this: after FLUSHALL there is another one.
    async fn key(&self, store: &Store, max_age: Duration) -> Result<hmac::Key, Error> {
        let known = self.key.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((key, _)) = known.filter(|(_, at)| at.elapsed() < max_age) {
            return Ok(key);
        }
        let key = shared_key(store).await?;
        *self.key.lock().unwrap_or_else(PoisonError::into_inner) = Some((key.clone(), Instant::now()));
        Ok(key)
    }

    /// An id that is the same for the same name, in each replica, and that nobody else can know.
    pub(crate) async fn turn(&self, store: &Store, name: &str) -> Result<TurnId, Error> {
        let tag = hmac::sign(&self.key(store, KEY_AGE).await?, format!("turn {name}").as_bytes());
        tag.as_ref().first_chunk().copied().ok_or_else(Error::internal)
    }

    async fn write(&self, store: &Store, filter: &Filter<'_>, cursor: Cursor) -> Result<String, Error> {
        let mut token = cursor.0.to_be_bytes().to_vec();
        token.extend_from_slice(cursor.1.bytes());
        let tag = hmac::sign(&self.key(store, KEY_AGE).await?, &filter.sealed(&token));
        token.extend_from_slice(&tag.as_ref()[..SEAL]);
        Ok(BASE64_URL_SAFE_NO_PAD.encode(token))
    }

    async fn read(&self, store: &Store, filter: &Filter<'_>, token: &str) -> Result<Cursor, Error> {
        let invalid = || Error::invalid("pageToken", "is not one that was given out for this filter");
        if token.len() > 64 {
            return Err(invalid());
        }
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token).map_err(|_| invalid())?;
        let (place, seal) = bytes.split_at_checked(8 + 16).ok_or_else(invalid)?;
        let sealed = filter.sealed(place);
        let fits = |key: &hmac::Key| {
            let tag = hmac::sign(key, &sealed);
            aws_lc_rs::constant_time::verify_slices_are_equal(&tag.as_ref()[..SEAL], seal).is_ok()
        };
        // Another replica may know a newer key.
        if !fits(&self.key(store, KEY_AGE).await?) && !fits(&self.key(store, Duration::ZERO).await?) {
            return Err(invalid());
        }
        let (score, task) = place.split_first_chunk().ok_or_else(invalid)?;
        Ok((i64::from_be_bytes(*score), TaskId::stored(task).ok_or_else(invalid)?))
    }
}

/// Reads the key, or makes it, once for all replicas.
async fn shared_key(store: &Store) -> Result<hmac::Key, Error> {
    for _ in 0..8 {
        let found = store.records(0, &[keys::CURSOR_KEY]).await?.pop().flatten();
        if let Some(record) = found {
            return Ok(hmac::Key::new(hmac::HMAC_SHA256, &record.bytes));
        }
        let mut key = [0; 32];
        rand::fill(&mut key).map_err(|_| Error::internal())?;
        let batch = Batch {
            checks: vec![Check::Absent { key: keys::CURSOR_KEY.to_owned() }],
            ops: vec![Op::Put { key: keys::CURSOR_KEY.to_owned(), bytes: key.to_vec().into() }],
            // Reading must work when there is no room for more tasks.
            releasing: true,
            ..Batch::default()
        };
        match store.engine.commit(batch).await {
            Ok(_) | Err(KernelError::Conflict { .. }) => {}
            Err(error) => return Err(failed(&error)),
        }
    }
    Err(Error::unavailable())
}

/// Which tasks.
#[derive(Debug)]
struct Filter<'a> {
    scope: &'a Scope,
    context: Option<&'a str>,
    state: Option<i32>,
    since: Option<i64>,
}

impl Filter<'_> {
    /// What a token is sealed with.
    fn sealed(&self, place: &[u8]) -> Vec<u8> {
        let mut bytes = place.to_vec();
        let context = self.context.unwrap_or_default();
        for part in [&self.scope.agent, &self.scope.tenant, &self.scope.owner, context] {
            bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes.extend_from_slice(&self.state.unwrap_or_default().to_be_bytes());
        bytes.extend_from_slice(&self.since.unwrap_or(i64::MIN).to_be_bytes());
        bytes
    }
}

/// The first whole millisecond that is not before this moment: stored times are whole milliseconds.
fn ceil_millis(at: &Timestamp) -> i64 {
    let floor = at.as_millis();
    if at.nanos % 1_000_000 == 0 { floor } else { floor.saturating_add(1) }
}

/// A page of tasks.
///
/// # Errors
/// Parameters that are out of range, tokens of others, and a store that is away.
pub(crate) async fn list(
    store: &Store,
    seal: &Seal,
    scope: &Scope,
    query: &ListTasksRequest,
) -> Result<ListTasksResponse, Error> {
    let page_size = match query.page_size {
        None => PAGE,
        Some(size @ 1..=MAX_PAGE) => usize::try_from(size).unwrap_or(PAGE),
        Some(_) => return Err(Error::invalid("pageSize", format!("must be from 1 to {MAX_PAGE}"))),
    };
    let shape = Shape {
        artifacts: query.include_artifacts.unwrap_or(false),
        ..Shape::history("historyLength", Some(query.history_length.unwrap_or(0)))?
    };
    let state = TaskState::try_from(query.status).map_err(|_| Error::invalid("status", "is no task state"))?;
    if let Some(at) = &query.status_timestamp_after {
        at.check().map_err(|_| Error::invalid("statusTimestampAfter", "is no time in the years 1 to 9999"))?;
    }
    let filter = Filter {
        scope,
        context: Some(query.context_id.as_str()).filter(|context| !context.is_empty()),
        state: (state != TaskState::Unspecified).then_some(query.status),
        since: query.status_timestamp_after.as_ref().map(ceil_millis),
    };
    let after = match query.page_token.as_str() {
        "" => None,
        token => Some(seal.read(store, &filter, token).await?),
    };
    let shards = store.engine.shards();
    let shards: Vec<Shard> = match filter.context {
        Some(context) => vec![keys::shard(scope, context, shards)],
        None => (0..shards).collect(),
    };
    let index = ScopeKey::new(scope).list(filter.context, filter.state);
    let rows = try_join_all(shards.iter().map(|shard| rows(store, *shard, &index, after, filter.since, page_size)));
    let counts = try_join_all(shards.iter().map(|shard| store.engine.index_count(*shard, &index, filter.since)));
    let counts = async { counts.await.map_err(|error| failed(&error)) };
    let (rows, counts) = try_join(rows, counts).await?;

    let mut rows: Vec<Cursor> = rows.into_iter().flatten().collect();
    // The text of ids sorts as their bytes do.
    rows.sort_unstable_by(|one, other| other.cmp(one));
    let more = rows.len() > page_size;
    rows.truncate(page_size);
    let (tasks, taken) = tasks(store, &filter, shape, &rows).await?;
    let next_page_token = match rows.get(taken.wrapping_sub(1)) {
        Some(last) if more || taken < rows.len() => seal.write(store, &filter, *last).await?,
        _ => String::new(),
    };
    Ok(ListTasksResponse {
        tasks,
        next_page_token,
        page_size: i32::try_from(page_size).unwrap_or(MAX_PAGE),
        total_size: i32::try_from(counts.into_iter().sum::<u64>()).unwrap_or(i32::MAX),
    })
}

/// One more row than a page has, from one shard.
async fn rows(
    store: &Store,
    shard: Shard,
    index: &str,
    after: Option<Cursor>,
    since: Option<i64>,
    page: usize,
) -> Result<Vec<Cursor>, Error> {
    let query = IndexQuery {
        index: index.to_owned(),
        order: Order::Descending,
        after: after.map(|(score, task)| (score, task.to_string())),
        min: since,
        max: None,
        limit: page + 1,
    };
    let rows = store.engine.index(shard, &query).await.map_err(|error| failed(&error))?;
    Ok(rows.into_iter().filter_map(|(score, id)| Some((score, TaskId::parse(&id, Shard::MAX)?))).collect())
}

/// The tasks of some rows, as many as fit into an answer, and how many rows these are. A task that has moved out
/// of the filter, or is gone, since the index was read is left out.
async fn tasks(store: &Store, filter: &Filter<'_>, shape: Shape, rows: &[Cursor]) -> Result<(Vec<Task>, usize), Error> {
    let mut heads: Vec<_> = rows.iter().map(|_| None).collect();
    let mut by_shard = std::collections::BTreeMap::<Shard, Vec<usize>>::new();
    for (n, (_, task)) in rows.iter().enumerate() {
        by_shard.entry(task.shard()).or_default().push(n);
    }
    let reads = by_shard.iter().map(|(shard, places)| {
        let ids: Vec<TaskId> = places.iter().map(|n| rows[*n].1).collect();
        async move { store.heads(*shard, &ids).await }
    });
    for (places, found) in by_shard.values().zip(try_join_all(reads).await?) {
        for (n, head) in places.iter().zip(found) {
            heads[*n] = head;
        }
    }
    let fits =
        |head: &Head| head.visible_to(filter.scope) && filter.state.is_none_or(|state| head.state() as i32 == state);
    let mut wholes = Vec::with_capacity(rows.len());
    for ((_, task), held) in rows.iter().zip(heads) {
        let (task, held) = (*task, held.filter(|held| fits(&held.value)));
        wholes.push(async move {
            match held {
                Some(held) => store.task_from(task, Some(held), shape).await,
                None => Ok(None),
            }
        });
    }
    let mut wholes = stream::iter(wholes).buffered(AT_ONCE).enumerate();
    let (mut tasks, mut bytes) = (Vec::with_capacity(rows.len()), 0);
    while let Some((n, whole)) = wholes.next().await {
        let Some((_, whole)) = whole? else { continue };
        bytes += whole.encoded_len();
        if bytes > PAGE_BYTES && !tasks.is_empty() {
            return Ok((tasks, n));
        }
        tasks.push(whole);
    }
    Ok((tasks, rows.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_between_two_milliseconds_is_the_next_one() {
        let at = |nanos| ceil_millis(&Timestamp { seconds: 2, nanos });
        assert_eq!((at(0), at(5_000_000), at(5_000_001), at(999_999_999)), (2000, 2005, 2006, 3000));
        assert_eq!(ceil_millis(&Timestamp { seconds: -1, nanos: 1 }), -999);
    }
}
