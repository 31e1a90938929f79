//! What a store was installed with: noted in Redis, compared at start, and noted again should it be gone.

use std::{sync::Arc, time::Duration};

use redis::Value;
use tokio::time::sleep;

use super::{
    checks::OpenError,
    keys::kind,
    link::{Failure, Link, Lost},
    value,
};
use crate::{Error, Shard};

/// How keys and values are laid out. A version of Rialto that lays them out in another way has another number.
const LAYOUT: u32 = 1;

/// Between two looks whether the note is still there.
const PACE: Duration = Duration::from_secs(5);

/// Loads the functions, notes what the store is installed with if nobody did yet, and answers the number of shards
/// that is noted.
pub(super) async fn install(link: &Link, shards: Shard) -> Result<Shard, OpenError> {
    match link.ask(0, &link.library.load(), Lost::Repeat).await.map_err(open_error) {
        // A user with few rights relies on others to load them, and a full server takes none before it is less full.
        Err(OpenError::Setup(text)) if text.contains("already exists") || text.contains("NoPerm") => {}
        Err(OpenError::Unreachable { .. }) | Ok(_) => {}
        Err(error) => return Err(error),
    }
    note(link, shards).await
}

/// Notes the store again whenever the note is gone, as after FLUSHALL; for ever.
pub(super) async fn keep(link: Arc<Link>) {
    let shards = link.keys.shards();
    loop {
        sleep(PACE).await;
        match note(&link, shards).await {
            Ok(found) => {
                let foreign = found != shards;
                if foreign && !link.set_foreign(true) {
                    tracing::error!(
                        found,
                        shards,
                        "the store was installed anew with other shards; restart this process"
                    );
                } else if !foreign && link.set_foreign(false) {
                    tracing::info!("the store is ours again");
                }
            }
            Err(OpenError::Unreachable { .. }) => {}
            Err(error) => tracing::warn!(%error, "cannot look at the store"),
        }
    }
}

/// Answers the number of shards that is noted, and notes this one when there is none.
async fn note(link: &Link, shards: Shard) -> Result<Shard, OpenError> {
    let meta = link.keys.key(0, kind::PLAIN, "meta");
    let ask = async |command: &redis::Cmd| link.ask(0, command, Lost::Repeat).await.map_err(open_error);
    let read = redis::cmd("HMGET").arg(&meta).arg("shards").arg("layout").take();
    let mut stored = value::list(ask(&read).await?).unwrap_or_default();
    if stored.contains(&Value::Nil) {
        // Somebody else may be quicker.
        for (field, value) in [("shards", u32::from(shards)), ("layout", LAYOUT)] {
            ask(redis::cmd("HSETNX").arg(&meta).arg(field).arg(value)).await?;
        }
        stored = value::list(ask(&read).await?).unwrap_or_default();
    }
    let numbers: Vec<_> = stored.iter().map(|value| u32::try_from(value::int(value)?).ok()).collect();
    let [Some(shards), Some(layout)] = numbers.as_slice() else {
        return Err(OpenError::Setup(format!("{meta} does not hold a number of shards and a layout")));
    };
    if *layout != LAYOUT {
        return Err(OpenError::Layout { stored: *layout, own: LAYOUT });
    }
    Shard::try_from(*shards).map_err(|_| OpenError::Setup(format!("{meta} holds {shards} shards")))
}

fn open_error(failure: Failure) -> OpenError {
    match failure {
        // Until somebody finishes something.
        Failure::Refused(Error::Full) => away("its memory is full".to_owned()),
        Failure::Refused(Error::Unavailable(reason)) => OpenError::Setup(reason),
        Failure::Refused(error) => OpenError::Setup(error.to_string()),
        Failure::Away(Error::Unavailable(reason)) => away(reason),
        Failure::Away(error) => away(error.to_string()),
    }
}

fn away(reason: String) -> OpenError {
    OpenError::Unreachable { place: "the server of shard 0".to_owned(), reason }
}
