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
-- commit: KEYS and ARGV are read front to back, by checks first and operations next.

local keys, args, k, a

local function key()
    k = k + 1
    return keys[k]
end

local function arg()
    a = a + 1
    return args[a]
end

-- A record is a string: its version and the lengths of its refs and of its last commit, these two, and its value.
-- Refs are lines, `<name>=<id>`. The last commit is its id and what it was answered. See `record.rs`.
local HEADER, HEADER_LENGTH = '>I4I4I4', 12
-- The last byte of a first look, which nearly always has all but the value.
local LOOK = '159'

-- State of the commit that runs. Of records: versions, 0 = there is none; refs; last commits; values to be written,
-- so that each record costs one command.
local known, refs, commits, writes, limits, versions, entries

local function version(record)
    local found = known[record]
    if found then return found end
    local start, refs_length, commit_length = call('GETRANGE', record, '0', LOOK), nil, nil
    if start == '' then
        found, refs[record], commits[record] = 0, '', ''
    else
        found, refs_length, commit_length = struct.unpack(HEADER, start)
        local refs_end = HEADER_LENGTH + refs_length
        local commit_end = refs_end + commit_length
        if commit_end > #start then start = call('GETRANGE', record, '0', commit_end - 1) end
        refs[record] = string.sub(start, HEADER_LENGTH + 1, refs_end)
        commits[record] = string.sub(start, refs_end + 1, commit_end)
    end
    known[record] = found
    return found
end

local function write(record)
    local refs, commit = refs[record], commits[record]
    call('SET', record, struct.pack(HEADER, known[record], #refs, #commit) .. refs .. commit .. writes[record])
end

-- Each returns nothing when it holds, otherwise kind and value of the conflict.
local checks = {}

function checks.version()
    local found, expected = version(key()), tonumber(arg())
    if found == 0 then return 'version', '-' end
    if found ~= expected then return 'version', found end
end

function checks.absent()
    local found = version(key())
    if found > 0 then return 'version', found end
end

function checks.pending()
    local row, consumer = pending(key(), arg()), arg()
    if not row or row[2] ~= consumer then return 'pending', '-' end
end

function checks.tail()
    local stream, aside, expected = key(), key(), arg()
    local newest = tail(stream, aside)
    if newest ~= expected then return 'tail', newest end
end

function checks.shorter()
    local length = call('XLEN', key())
    if length >= tonumber(arg()) then return 'length', length end
end

-- Generic cell rate algorithm, in microseconds: the key says when the limit has all its room again.
function checks.limit()
    local limit, burst, interval = key(), tonumber(arg()), tonumber(arg())
    local seconds, micros = clock()
    local now = seconds * 1000000 + micros
    local full_at = limits[limit] or tonumber(call('GET', limit) or 0)
    local next = math.max(full_at, now) + interval
    local over = next - now - burst * interval
    if over > 0 then return 'limit', string.format('%.0f', over) end
    limits[limit] = next
end

-- What operations need in order not to fail half way.
local needs = {}

function needs.record()
    if version(key()) == 0 then return 'append into a record that does not exist' end
end

function needs.above()
    local stream, aside, id = key(), key(), arg()
    local removed = call('GET', aside)
    local low = removed and tonumber(string.match(removed, '^%d+')) >= tonumber(string.match(id, '^%d+'))
    -- Cheaper than looking at the newest: usually there is nothing to be found.
    if low or #call('XRANGE', stream, id, '+', 'COUNT', '1') > 0 then return 'entry number is not above the newest' end
end

local operations = {}

function operations.put()
    local record = key()
    local new = version(record) + 1
    known[record] = new
    versions[#versions + 1] = new
    writes[record] = arg()
end

function operations.delete()
    local record = key()
    known[record], refs[record], commits[record], writes[record] = 0, '', '', nil
    call('UNLINK', record)
end

-- Constants are texts: making one of a number costs more than finding the key.
-- All members of an index have the same score: theirs is a part of their name. See `index.rs`.
function operations.index()
    local last = a + 1 + arg()
    call('ZADD', key(), unpack(args, a + 1, last))
    a = last
end

function operations.unindex()
    local last = a + 1 + arg()
    call('ZREM', key(), unpack(args, a + 1, last))
    a = last
end

function operations.append()
    entries[#entries + 1] = call('XADD', key(), arg(), 't', arg(), 'p', arg())
end

-- The first of all operations, so that an error leaves nothing behind.
function operations.append_first()
    local id = pcall('XADD', key(), arg(), 't', arg(), 'p', arg())
    if id.err then return id.err end
    entries[#entries + 1] = id
end

function operations.append_into()
    operations.append()
    local record, name = key(), arg()
    if not writes[record] then
        version(record)
        writes[record] = string.sub(call('GET', record), HEADER_LENGTH + #refs[record] + #commits[record] + 1)
    end
    local kept = '\n' .. refs[record]
    if kept ~= '\n' then kept = string.gsub(kept, '\n' .. string.gsub(name, '%W', '%%%0') .. '=[^\n]*', '', 1) end
    refs[record] = string.sub(kept, 2) .. name .. '=' .. entries[#entries] .. '\n'
end

function operations.delay()
    local id = arg()
    call('ZADD', key(), arg(), id)
    call('HSET', key(), id, arg())
end

function operations.undelay()
    local id = arg()
    call('ZREM', key(), id)
    call('HDEL', key(), id)
end

function operations.ack()
    acknowledge(key(), arg())
end

function operations.hand_back()
    local stream, id, publish, channel, name = key(), arg(), arg(), key(), arg()
    -- An entry that was deleted meanwhile is no longer pending after this, which is right.
    if pending(stream, id) and #call('XCLAIM', stream, GROUP, HANDED_BACK, 0, id, 'JUSTID') > 0 then
        call(publish, channel, name)
    end
end

-- The form of a dead entry is DeadEntry's: a line of JSON, a line feed, the payload.
function operations.bury()
    local stream, id, dead, name, reason = key(), arg(), key(), arg(), arg()
    local row = pending(stream, id)
    if not row then return end
    local entry = call('XRANGE', stream, id, id)[1]
    acknowledge(stream, id)
    if entry then
        local tag, payload = entry[2][2], entry[2][4]
        local line = cjson.encode({
            stream = name, id = id, tag = tonumber(tag), deliveries = row[4], reason = reason, at = now_ms(),
        })
        call('XADD', dead, '*', 't', tag, 'p', line .. '\n' .. payload)
    end
end

function operations.remove()
    local stream, aside, id = key(), key(), arg()
    local newest = tail(stream, aside)
    if call('XDEL', stream, id) == 1 and newest == id then call('SET', aside, id) end
end

function operations.drop()
    call('UNLINK', key(), key())
end

function operations.notify()
    call(arg(), key(), arg())
end

local function commit(KEYS, ARGV)
    keys, args, k, a = KEYS, ARGV, 0, 0
    known, refs, commits, writes, limits, versions, entries = {}, {}, {}, {}, {}, {}, {}

    local id, lead = arg(), nil
    if id ~= '' then
        lead = key()
        version(lead)
        local last = commits[lead]
        if string.sub(last, 1, #id) == id then return '=' .. string.sub(last, #id + 1) end
    end
    for check = 0, tonumber(arg()) - 1 do
        local kind, value = checks[arg()]()
        if kind then return redis.error_reply('CONFLICT ' .. check .. ' ' .. kind .. ' ' .. value) end
    end
    for _ = 1, tonumber(arg()) do
        local fault = needs[arg()]()
        if fault then return redis.error_reply('MALFORMED ' .. fault) end
    end

    local last = #args
    while a < last do
        local fault = operations[arg()]()
        if fault then return redis.error_reply('MALFORMED ' .. fault) end
    end

    local now = now_ms()
    local result = now .. ';' .. table.concat(versions, ',') .. ';' .. table.concat(entries, ',')
    if lead then commits[lead] = id .. result end
    for record in pairs(writes) do write(record) end
    for limit, full_at in pairs(limits) do
        local left = math.ceil(full_at / 1000) - now
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
    local unread = lag or math.max(length - owned - waiting_again, 0)
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
