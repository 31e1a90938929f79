//! What the user must be allowed to do (`docs/deploy.md` has it as one rule), and what of it is missing.

use redis::{RedisResult, aio::MultiplexedConnection};

/// All that is sent to any server, by its right; `K` stands for a key and `C` for a channel.
const EVERYWHERE: &[&str] = &[
    "ping",
    "select 0",
    "info",
    "time",
    "client|id",
    "client|unblock 1",
    "eval x 0",
    "fcall x 0",
    "fcall_ro x 0",
    "function|load x",
    "get K",
    "mget K",
    "getrange K 0 0",
    "set K x",
    "unlink K",
    "hget K x",
    "hmget K x",
    "hset K x x",
    "hsetnx K x x",
    "hdel K x",
    "zadd K 0 x",
    "zrem K x",
    "zcard K",
    "zrange K - + BYLEX",
    "zlexcount K - +",
    "xadd K * x x",
    "xlen K",
    "xrange K - +",
    "xrevrange K + -",
    "xdel K 0-1",
    "xack K x 0-1",
    "xclaim K x x 0 0-1",
    "xpending K x",
    "xreadgroup GROUP x x STREAMS K >",
    "xgroup|create K x 0",
    "xgroup|delconsumer K x x",
    "xinfo|consumers K x",
    "xinfo|groups K",
];

/// What is sent to a server alone or behind Sentinels besides.
const ALONE: &[&str] = &["role", "publish C x", "subscribe C"];

/// What is sent to the servers of a cluster besides.
const CLUSTER: &[&str] = &["cluster|slots", "asking", "spublish C x", "ssubscribe C"];

/// Answers number and reason of each command that the caller may not call. Nothing is done: those that it may call
/// are not called, and the others are refused.
const SCRIPT: &str = "
local refused = {}
for number, command in ipairs(redis.acl_check_cmd and cjson.decode(ARGV[1]) or {}) do
    local known, allowed = pcall(redis.acl_check_cmd, unpack(command))
    if not (known and allowed) then
        local answer = redis.pcall(unpack(command))
        refused[#refused + 1] = { number - 1, type(answer) == 'table' and answer.err or '' }
    end
end
return refused";

/// The rights that the user of this connection lacks, as `ACL SETUSER` takes them: `~rialto:* +xack`. Empty if none.
pub(super) async fn lacking(
    connection: &mut MultiplexedConnection,
    prefix: &str,
    cluster: bool,
) -> RedisResult<Vec<String>> {
    let needed: Vec<_> = EVERYWHERE.iter().chain(if cluster { CLUSTER } else { ALONE }).copied().collect();
    let commands: Vec<Vec<String>> = needed.iter().map(|line| words(line, prefix)).collect();
    let commands = serde_json::to_string(&commands).expect("lists of texts have a form in JSON");
    let mut script = redis::cmd("EVAL");
    let refused: Vec<(usize, String)> = script.arg(SCRIPT).arg(0).arg(commands).query_async(connection).await?;
    let refused: Vec<_> =
        refused.iter().filter_map(|(number, why)| Some((*needed.get(*number)?, why.as_str()))).collect();
    Ok(rights(&needed, &refused, prefix))
}

/// `xack K x 0-1` as it would be sent.
fn words(line: &str, prefix: &str) -> Vec<String> {
    let (command, arguments) = line.split_once(' ').unwrap_or((line, ""));
    let arguments = arguments.split_terminator(' ').map(|argument| match argument {
        "K" | "C" => format!("{prefix}{{s0}}:x"),
        argument => argument.to_owned(),
    });
    command.split('|').map(ToOwned::to_owned).chain(arguments).collect()
}

fn rights(needed: &[&str], refused: &[(&str, &str)], prefix: &str) -> Vec<String> {
    let mut rights = Vec::new();
    let mut by_pattern = Vec::new();
    for (sign, mark) in [("~", "K"), ("&", "C")] {
        let of_kind = |line: &str| line.split(' ').any(|word| word == mark);
        let some = refused.iter().filter(|(line, _)| of_kind(line));
        // The command is looked at first, so nothing else is known of a user who may call none of them.
        let all = some.clone().count() == needed.iter().filter(|line| of_kind(line)).count();
        let said = some.clone().any(|(_, why)| is_of_pattern(why));
        if all || said {
            rights.push(format!("{sign}{prefix}*"));
            // Some are refused in scripts before anybody looks at rights.
            by_pattern.extend(some.filter(|(_, why)| said && !is_of_command(why)));
        }
    }
    let commands = refused.iter().filter(|one| !by_pattern.contains(one));
    rights.extend(commands.map(|(line, _)| format!("+{}", line.split(' ').next().unwrap_or(line))));
    rights
}

/// Redis 7.0 says `can't run this command`, later ones `no permissions to run the 'get' command`.
fn is_of_command(why: &str) -> bool {
    why.contains(" run th")
}

/// `can't access at least one of the keys` and `can't publish to the channel`, or `No permissions to access a key`.
fn is_of_pattern(why: &str) -> bool {
    !is_of_command(why) && (why.contains(" access a") || why.contains(" publish to "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_pattern_is_told_apart_from_missing_commands() {
        let needed = ["ping", "get K", "set K x", "publish C x", "subscribe C"];
        let rights = |refused: &[(&str, &str)]| rights(&needed, refused, "r:").join(" ");
        let unknown = "ERR This Redis command is not allowed from script";
        for (command, pattern) in [
            ("ERR The user executing the script can't run this command or subcommand", "ERR x can't access at least x"),
            ("NOPERM x: User a has no permissions to run the 'x' command", "NOPERM x: No permissions to access a key"),
        ] {
            assert_eq!(rights(&[("ping", unknown), ("set K x", command)]), "+ping +set");
            assert_eq!(rights(&[("get K", pattern), ("set K x", command)]), "~r:* +set");
            assert_eq!(rights(&[("get K", command), ("set K x", command)]), "~r:* +get +set");
            assert_eq!(rights(&[("subscribe C", unknown)]), "+subscribe");
            assert_eq!(rights(&[("publish C x", pattern), ("subscribe C", unknown)]), "&r:*");
        }
        assert_eq!(rights(&[]), "");
        assert_eq!(words("xgroup|create K x 0", "r:"), ["xgroup", "create", "r:{s0}:x", "x", "0"]);
    }
}
