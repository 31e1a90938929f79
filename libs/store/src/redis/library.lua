#!lua name=@

-- What happens inside Redis. The name of the library, which also starts the names of its functions, is made of
-- the hash of this text: another text is another library, loaded beside this one and never in its place, so
-- processes of two versions work on one Redis.
--
-- Errors start with a code word: CONFLICT <check> <kind> <value>, or MALFORMED <text>.

-- Set when a function starts: while the library is loaded, nothing can be called.
local call, pcall

-- The consumer group of every work stream, and the consumer that owns entries which were given back.
local GROUP = 'workers'
local HANDED_BACK = 'handed-back'

-- After every entry that there will be. (The very last id means '>' to XREADGROUP.)
local LAST = '18446744073709551615-0'

local function clock()
    local time = call('TIME')
    return tonumber(time[1]), tonumber(time[2])
end

local function now_ms()
    local seconds, micros = clock()
    return seconds * 1000 + math.floor(micros / 1000)
end

-- The XPENDING row {id, consumer, idle, deliveries} of one entry; nil when it is not pending.
local function pending(stream, id)
    local rows = pcall('XPENDING', stream, GROUP, id, id, '1')
    return rows[1]
end

-- Id of the newest entry that the stream ever had. XINFO STREAM knows it, and costs twice as much; so when the
-- newest entry is removed, its id is kept aside.
local function tail(stream, aside)
    local newest = call('XREVRANGE', stream, '+', '-', 'COUNT', '1')[1]
    local top, removed = newest and newest[1], call('GET', aside)
    if not removed then return top or '0-0' end
    if not top then return removed end
    local ms, seq = string.match(top, '(%d+)-(%d+)')
    local removed_ms, removed_seq = string.match(removed, '(%d+)-(%d+)')
    ms, removed_ms = tonumber(ms), tonumber(removed_ms)
    local newer = removed_ms > ms or (removed_ms == ms and tonumber(removed_seq) > tonumber(seq))
    return newer and removed or top
end

local function acknowledge(stream, id)
    -- Never delete what nobody has read: it blinds the lag of the group. Without a group nothing is pending.
    if pcall('XACK', stream, GROUP, id) == 1 then
        call('XDEL', stream, id)
        return true
    end
end

--------------------------------------------------------------------------------------------------------------
-- Commit

-- A record is a string: its version and the lengths of its refs and of its last commit, these two, and its value.
-- Refs are lines, `<name>=<id>`. The last commit is its id and what it was answered. See `record.rs`.
local HEADER, HEADER_LENGTH = '>I4I4I4', 12
-- The last byte of a first look, which nearly always has all but the value.
local LOOK = '95'

-- Of the commit that runs: records by key, full times of limits by key, versions and entries of the answer.
local records, limits, versions, entries

-- A record without its value, which is set when it is to be written: once, at the end.
local function look(key)
    local record = records[key]
    if record then return record end
    local start = call('GETRANGE', key, '0', LOOK)
    if start == '' then
        record = { version = 0, refs = '', commit = '', value = false }
    else
        local version, refs_end, commit_end = struct.unpack(HEADER, start)
        refs_end = HEADER_LENGTH + refs_end
        commit_end = refs_end + commit_end
        if commit_end > #start then start = call('GETRANGE', key, '0', commit_end - 1) end
        record = {
            version = version,
            refs = string.sub(start, HEADER_LENGTH + 1, refs_end),
            commit = string.sub(start, refs_end + 1, commit_end),
            value = false,
        }
    end
    records[key] = record
    return record
end

-- What a commit is made of: checks, then what operations need in order not to fail half way, then operations. Each
-- gets keys and arguments with the places of its own, and answers the places behind them; and, as long as nothing
-- is written, kind and value of a conflict, or MALFORMED and a text. Passing places costs a fraction of what calls
-- for the next key and argument would.
local steps = {}
local MALFORMED = 'MALFORMED'

function steps.version(keys, k, args, a)
    local found = look(keys[k]).version
    if found == 0 then return k + 1, a + 1, 'version', '-' end
    if found ~= tonumber(args[a]) then return k + 1, a + 1, 'version', found end
    return k + 1, a + 1
end

function steps.absent(keys, k, args, a)
    local found = look(keys[k]).version
    if found > 0 then return k + 1, a, 'version', found end
    return k + 1, a
end

function steps.pending(keys, k, args, a)
    local row = pending(keys[k], args[a])
    if not row or row[2] ~= args[a + 1] then return k + 1, a + 2, 'pending', '-' end
    return k + 1, a + 2
end

function steps.tail(keys, k, args, a)
    local newest = tail(keys[k], keys[k + 1])
    if newest ~= args[a] then return k + 2, a + 1, 'tail', newest end
    return k + 2, a + 1
end

function steps.shorter(keys, k, args, a)
    local length = call('XLEN', keys[k])
    if length >= tonumber(args[a]) then return k + 1, a + 1, 'length', length end
    return k + 1, a + 1
end

-- Generic cell rate algorithm, in microseconds: the key says when the limit has all its room again.
function steps.limit(keys, k, args, a)
    local limit, burst, interval = keys[k], tonumber(args[a]), tonumber(args[a + 1])
    local seconds, micros = clock()
    local now = seconds * 1000000 + micros
    limits = limits or {}
    local full_at = limits[limit] or tonumber(call('GET', limit) or 0)
    local next = math.max(full_at, now) + interval
    local over = next - now - burst * interval
    if over > 0 then return k + 1, a + 2, 'limit', string.format('%.0f', over) end
    limits[limit] = next
    return k + 1, a + 2
end

function steps.needs_record(keys, k, args, a)
    if look(keys[k]).version == 0 then
        return k + 1, a, MALFORMED, 'append into a record that does not exist'
    end
    return k + 1, a
end

function steps.needs_above(keys, k, args, a)
    local id, removed = args[a], call('GET', keys[k + 1])
    local low = removed and tonumber(string.match(removed, '^%d+')) >= tonumber(string.match(id, '^%d+'))
    -- Cheaper than looking at the newest: usually there is nothing to be found.
    if low or #call('XRANGE', keys[k], id, '+', 'COUNT', '1') > 0 then
        return k + 2, a + 1, MALFORMED, 'entry number is not above the newest'
    end
    return k + 2, a + 1
end

function steps.put(keys, k, args, a)
    local record = look(keys[k])
    local version = record.version + 1
    record.version, record.value = version, args[a]
    versions[#versions + 1] = version
    return k + 1, a + 1
end

function steps.delete(keys, k, args, a)
    local record = look(keys[k])
    record.version, record.refs, record.commit, record.value = 0, '', '', false
    call('UNLINK', keys[k])
    return k + 1, a
end

-- All members of an index have the same score: theirs is a part of their name. See `index.rs`. Constants are texts:
-- making one of a number costs more than finding the key.
function steps.index(keys, k, args, a)
    call('ZADD', keys[k], '0', args[a])
    return k + 1, a + 1
end

function steps.index_two(keys, k, args, a)
    call('ZADD', keys[k], '0', args[a], '0', args[a + 1])
    return k + 1, a + 2
end

function steps.unindex(keys, k, args, a)
    call('ZREM', keys[k], args[a])
    return k + 1, a + 1
end

function steps.unindex_two(keys, k, args, a)
    call('ZREM', keys[k], args[a], args[a + 1])
    return k + 1, a + 2
end

function steps.append(keys, k, args, a)
    entries[#entries + 1] = call('XADD', keys[k], args[a], 't', args[a + 1], 'p', args[a + 2])
    return k + 1, a + 3
end

-- The first of all operations, so that an error leaves nothing behind.
function steps.append_first(keys, k, args, a)
    local id = pcall('XADD', keys[k], args[a], 't', args[a + 1], 'p', args[a + 2])
    if id.err then return k + 1, a + 3, MALFORMED, id.err end
    entries[#entries + 1] = id
    return k + 1, a + 3
end

function steps.append_into(keys, k, args, a)
    steps.append(keys, k, args, a)
    local key, name = keys[k + 1], args[a + 3]
    local record = look(key)
    if not record.value then
        record.value = string.sub(call('GET', key), HEADER_LENGTH + #record.refs + #record.commit + 1)
    end
    local kept = ''
    if record.refs ~= '' then
        kept = string.gsub('\n' .. record.refs, '\n' .. string.gsub(name, '%W', '%%%0') .. '=[^\n]*', '', 1)
        kept = string.sub(kept, 2)
    end
    record.refs = kept .. name .. '=' .. entries[#entries] .. '\n'
    return k + 2, a + 4
end

function steps.delay(keys, k, args, a)
    local id = args[a]
    call('ZADD', keys[k], args[a + 1], id)
    call('HSET', keys[k + 1], id, args[a + 2])
    return k + 2, a + 3
end

function steps.undelay(keys, k, args, a)
    call('ZREM', keys[k], args[a])
    call('HDEL', keys[k + 1], args[a])
    return k + 2, a + 1
end

function steps.ack(keys, k, args, a)
    acknowledge(keys[k], args[a])
    return k + 1, a + 1
end

function steps.hand_back(keys, k, args, a)
    local stream, id = keys[k], args[a]
    -- An entry that was deleted meanwhile is no longer pending after this, which is right.
    if pending(stream, id) and #call('XCLAIM', stream, GROUP, HANDED_BACK, 0, id, 'JUSTID') > 0 then
        call(args[a + 1], keys[k + 1], args[a + 2])
    end
    return k + 2, a + 3
end

-- The form of a dead entry is DeadEntry's: a line of JSON, a line feed, the payload.
function steps.bury(keys, k, args, a)
    local stream, id = keys[k], args[a]
    local row = pending(stream, id)
    local entry = row and call('XRANGE', stream, id, id)[1]
    if row then acknowledge(stream, id) end
    if entry then
        local tag, payload = entry[2][2], entry[2][4]
        local line = cjson.encode({
            stream = args[a + 1], id = id, tag = tonumber(tag), deliveries = row[4], reason = args[a + 2], at = now_ms(),
        })
        call('XADD', keys[k + 1], '*', 't', tag, 'p', line .. '\n' .. payload)
    end
    return k + 2, a + 3
end

function steps.remove(keys, k, args, a)
    local stream, aside, id = keys[k], keys[k + 1], args[a]
    local newest = tail(stream, aside)
    if call('XDEL', stream, id) == 1 and newest == id then call('SET', aside, id) end
    return k + 2, a + 1
end

function steps.drop(keys, k, args, a)
    call('UNLINK', keys[k], keys[k + 1])
    return k + 2, a
end

function steps.notify(keys, k, args, a)
    call(args[a], keys[k], args[a + 1])
    return k + 1, a + 2
end

-- KEYS: the lead record, if there is one, and those of the steps. ARGV: id of the commit or '', and the steps.
-- Answers <at>;<version>,…;<entry>,… with a = before it when this is a repeat.
local function commit(keys, args)
    records, limits, versions, entries = {}, nil, {}, {}
    local id, lead, k, a = args[1], nil, 1, 2
    if id ~= '' then
        lead, k = look(keys[1]), 2
        local last = lead.commit
        if string.sub(last, 1, #id) == id then return '=' .. string.sub(last, #id + 1) end
    end
    local step, last, kind, value = 0, #args, nil, nil
    while a <= last do
        k, a, kind, value = steps[args[a]](keys, k, args, a + 1)
        if kind == MALFORMED then return redis.error_reply('MALFORMED ' .. value) end
        if kind then return redis.error_reply('CONFLICT ' .. step .. ' ' .. kind .. ' ' .. value) end
        step = step + 1
    end

    -- As a text, because Lua is slow to make one of a number.
    local time = call('TIME')
    local at = time[1] .. string.sub('00000' .. time[2], -6, -4)
    local result = at .. ';' .. table.concat(versions, ',') .. ';' .. table.concat(entries, ',')
    if lead then lead.commit = id .. result end
    for key, record in pairs(records) do
        local refs, commit, value = record.refs, record.commit, record.value
        if value then
            call('SET', key, struct.pack(HEADER, record.version, #refs, #commit) .. refs .. commit .. value)
        end
    end
    for limit, full_at in pairs(limits or {}) do
        local left = math.ceil(full_at / 1000) - tonumber(at)
        call('SET', limit, string.format('%.0f', full_at), 'PX', string.format('%.0f', math.max(left, 1)))
    end
    return result
end

--------------------------------------------------------------------------------------------------------------
-- Work

-- Rows of XPENDING with more arguments; an empty list when there is no group yet.
local function pending_rows(stream, ...)
    local rows = pcall('XPENDING', stream, GROUP, ...)
    if rows.err then
        if string.find(rows.err, '^NOGROUP') then return {}, true end
        error(rows)
    end
    return rows
end

-- KEYS: work streams, in order of preference.
-- ARGV: consumer, limit, lease in ms (0 = do not look for idle entries), idle time in ms after which a consumer
-- that owns nothing is removed (0 = never); then, for each stream, the number and ids of entries that were read for this consumer and never reached it.
-- Answers now, ms until an entry may become idle for that long, groups made, and for each entry: position of
-- its stream in KEYS, id, tag, payload, deliveries.
local function claim(KEYS, ARGV)
    local consumer, room, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
    local forget, at = tonumber(ARGV[4]), 4
    local reply = { now_ms(), lease, 0 }

    local function take(position, entry, deliveries)
        local id, fields = entry[1], entry[2]
        local n = #reply
        reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] =
            position, id, fields[2], fields[4], deliveries
        room = room - 1
    end

    for position, stream in ipairs(KEYS) do
        local given_back, no_group = pending_rows(stream, '-', '+', math.max(room, 1), HANDED_BACK)
        if no_group then
            call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
            reply[3] = reply[3] + 1
        end
        for _, row in ipairs(given_back) do
            if room > 0 then
                local entry = call('XCLAIM', stream, GROUP, consumer, 0, row[1])[1]
                if entry then take(position, entry, row[4] + 1) end
            end
        end

        local lost = tonumber(ARGV[at + 1])
        for n = at + 2, at + 1 + lost do
            local row = room > 0 and pending(stream, ARGV[n])
            if row and row[2] == consumer then
                local entry = call('XCLAIM', stream, GROUP, consumer, 0, row[1], 'RETRYCOUNT', row[4])[1]
                if entry then take(position, entry, row[4]) end
            end
        end
        at = at + 1 + lost

        if lease > 0 then
            -- Up to Redis 7.0 who reads nothing is not seen; who asks for what it owns is, whatever that is.
            call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', '1', 'STREAMS', stream, LAST)
            if room > 0 then
                for _, row in ipairs(pending_rows(stream, 'IDLE', lease, '-', '+', room + 100)) do
                    if room > 0 and row[2] ~= consumer then
                        -- An entry whose body was deleted leaves the list here, and nothing comes back for it.
                        local entry = call('XCLAIM', stream, GROUP, consumer, lease, row[1])[1]
                        if entry then take(position, entry, row[4] + 1) end
                    end
                end
            end
            local rows = pending_rows(stream, '-', '+', 100)
            for _, row in ipairs(rows) do
                if row[2] ~= HANDED_BACK and row[2] ~= consumer then reply[2] = math.min(reply[2], lease - row[3]) end
            end
            if #rows == 100 then reply[2] = math.min(reply[2], math.floor(lease / 3)) end
        end

        if forget > 0 then
            for _, facts in ipairs(call('XINFO', 'CONSUMERS', stream, GROUP)) do
                local name, owned, idle = facts[2], facts[4], facts[6]
                if owned == 0 and idle > forget and name ~= HANDED_BACK and name ~= consumer then
                    call('XGROUP', 'DELCONSUMER', stream, GROUP, name)
                end
            end
        end

        if room > 0 then
            local read = call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', room, 'STREAMS', stream, '>')
            for _, entry in ipairs(read and read[1][2] or {}) do take(position, entry, 1) end
        end
    end
    return reply
end

-- KEYS: work stream. ARGV: consumer, ids. Answers 1 for each that is still owned, else 0.
local function heartbeat(KEYS, ARGV)
    local stream, consumer, reply = KEYS[1], ARGV[1], {}
    for n = 2, #ARGV do
        local row = pending(stream, ARGV[n])
        local owned = row and row[2] == consumer
            and #call('XCLAIM', stream, GROUP, consumer, 0, ARGV[n], 'JUSTID') > 0
        reply[n - 1] = owned and 1 or 0
    end
    return reply
end

-- KEYS: for each work stream itself, its delayed ids by due time, their entries. ARGV: how many each at most.
-- Answers how many moved.
local function tick(KEYS, ARGV)
    local now, limit, moved = now_ms(), tonumber(ARGV[1]), 0
    for n = 1, #KEYS, 3 do
        local stream, due, bodies = KEYS[n], KEYS[n + 1], KEYS[n + 2]
        for _, id in ipairs(call('ZRANGE', due, '-inf', now, 'BYSCORE', 'LIMIT', 0, limit)) do
            local body = call('HGET', bodies, id)
            if body then
                call('XADD', stream, '*', 't', string.byte(body), 'p', string.sub(body, 2))
                moved = moved + 1
            end
            call('ZREM', due, id)
            call('HDEL', bodies, id)
        end
    end
    return moved
end

-- KEYS: work stream, its delayed ids. Answers waiting, pending, delayed, id of the oldest waiting entry or ''.
local function depth(KEYS)
    local stream, length, delayed = KEYS[1], call('XLEN', KEYS[1]), call('ZCARD', KEYS[2])
    local given_back, no_group = pending_rows(stream, '-', '+', 1, HANDED_BACK)
    if no_group then
        local first = call('XRANGE', stream, '-', '+', 'COUNT', '1')[1]
        return { length, 0, delayed, first and first[1] or '' }
    end
    local owned, waiting_again, lag, last = 0, 0, nil, '0-0'
    local summary = pending_rows(stream)
    for _, row in ipairs(summary[4] or {}) do
        if row[1] == HANDED_BACK then waiting_again = tonumber(row[2]) else owned = owned + tonumber(row[2]) end
    end
    for _, group in ipairs(call('XINFO', 'GROUPS', stream)) do
        if group[2] == GROUP then last, lag = group[8], group[12] end
    end
    local oldest = given_back[1] and given_back[1][1]
    if not oldest then
        local first = call('XRANGE', stream, '(' .. last, '+', 'COUNT', '1')[1]
        oldest = first and first[1] or ''
    end
    -- A stream that somebody trimmed has a lag that counts what nobody can read any more.
    local unread = lag and math.min(lag, length) or math.max(length - owned - waiting_again, 0)
    return { unread + waiting_again, owned, delayed, oldest }
end

local function register(name, body, flags)
    local function callback(KEYS, ARGV)
        call, pcall = redis.call, redis.pcall
        return body(KEYS, ARGV)
    end
    redis.register_function { function_name = '@_' .. name, callback = callback, flags = flags }
end

register('commit', commit)
register('release', commit, { 'allow-oom' })
register('claim', claim, { 'allow-oom' })
register('heartbeat', heartbeat, { 'allow-oom' })
register('tick', tick, { 'allow-oom' })
register('depth', depth, { 'no-writes' })
