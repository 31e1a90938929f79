//! Opens the store that the configuration names.

use std::{env, ffi::OsString, path::PathBuf, sync::Arc, time::Duration};

use rialto_runtime::config::{Config, StoreKind};
use rialto_store::{
    Engine,
    redis::{OpenError, RedisConfig, RedisEngine},
    sqlite::{SqliteConfig, SqliteEngine},
};
use tokio::time::sleep;
use tracing::{info, warn};

/// One file is one shard (design §4).
const SHARDS: u16 = 1;

/// Between two tries to reach Redis, growing.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// Opens the store. Waits for a Redis that is not there yet; what waiting does not mend is an error of one line.
pub(super) async fn open(config: &Config) -> Result<Arc<dyn Engine>, String> {
    match config.store {
        StoreKind::Sqlite => embedded(config).await,
        StoreKind::Redis => redis(config).await,
    }
}

async fn embedded(config: &Config) -> Result<Arc<dyn Engine>, String> {
    let sqlite = if config.ephemeral {
        SqliteConfig::memory(SHARDS)
    } else {
        let folder = config.data.clone().or_else(|| default_data(env::var_os("XDG_DATA_HOME"), env::var_os("HOME")));
        let folder = folder.ok_or("there is no home folder to keep tasks in; use --data DIR or --ephemeral")?;
        SqliteConfig::folder(folder, SHARDS)
    };
    let opened = tokio::task::spawn_blocking(|| SqliteEngine::open(sqlite)).await;
    opened
        .map_err(|error| format!("cannot open the store: {error}"))?
        .map_err(|error| error.to_string())
        .map(|e| e as _)
}

async fn redis(config: &Config) -> Result<Arc<dyn Engine>, String> {
    let redis = &config.redis;
    let settings = RedisConfig { prefix: redis.prefix.clone(), shards: redis.shards, ..RedisConfig::new(redis.url()) };
    let mut pause = FIRST_PAUSE;
    let mut told = false;
    loop {
        match RedisEngine::connect(settings.clone()).await {
            Ok(engine) => {
                if told {
                    info!("redis answers");
                }
                return Ok(engine);
            }
            Err(error @ OpenError::Unreachable { .. }) => {
                if !told {
                    warn!("{error}; trying again until it answers");
                    told = true;
                }
            }
            Err(error) => return Err(error.to_string()),
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// `rialto` in the user's data folder, as the XDG base directories have it: relative paths there are ignored.
fn default_data(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let base = xdg.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(".local/share")))?;
    Some(base.join("rialto"))
}

#[cfg(test)]
mod tests {
    use super::default_data;

    #[test]
    fn data_goes_where_the_desktop_says() {
        let data = |xdg: Option<&str>, home: Option<&str>| default_data(xdg.map(Into::into), home.map(Into::into));
        assert_eq!(data(Some("/x"), Some("/h")), Some("/x/rialto".into()));
        assert_eq!(data(Some("x"), Some("/h")), Some("/h/.local/share/rialto".into()));
        assert_eq!(data(None, None), None);
    }
}
