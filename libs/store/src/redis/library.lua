#!lua name=@

-- What happens inside Redis. The name of the library, which also starts the names of its functions, is made of
-- the hash of this text: another text is another library, loaded beside this one and never in its place, so
-- processes of two versions work on one Redis.
--
-- Errors start with a code word: CONFLICT <check> <kind> <value>, or MALFORMED <text>.

local call, pcall = redis.call, redis.pcall
local byte = string.byte

-- The consumer group of every work stream, and the consumer that owns entries which were given back.
local GROUP = 'workers'
local HANDED_BACK = 'handed-back'

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
    local rows = pcall('XPENDING', stream, GROUP, id, id, 1)
    return rows[1]
end

-- Id of the newest entry.
local function tail(stream)
    local newest = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    return newest and newest[1] or '0-0'
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

-- State of the commit that runs.
local tails, limits, versions, entries

-- Each returns nothing when it holds, otherwise kind and value of the conflict.
local checks = {}

function checks.version()
    local version, expected = call('HGET', key(), 'v'), arg()
    if version ~= expected then return 'version', version or '-' end
end

function checks.absent()
    local version = call('HGET', key(), 'v')
    if version then return 'version', version end
end

function checks.pending()
    local row, consumer = pending(key(), arg()), arg()
    if not row or row[2] ~= consumer then return 'pending', '-' end
end

function checks.tail()
    local stream, expected = key(), arg()
    local newest = tail(stream)
    tails[stream] = newest
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
    if call('EXISTS', key()) == 0 then return 'append into a record that does not exist' end
end

function needs.above()
    local stream, number = key(), tonumber(arg())
    local newest = tails[stream] or tail(stream)
    if tonumber(string.match(newest, '^%d+')) >= number then return 'entry number is not above the newest' end
end

local operations = {}

function operations.put()
    local record, value = key(), arg()
    versions[#versions + 1] = call('HINCRBY', record, 'v', 1)
    call('HSET', record, 'b', value)
end

function operations.delete()
    call('UNLINK', key())
end

function operations.index()
    call('ZADD', key(), arg(), arg())
end

function operations.unindex()
    call('ZREM', key(), arg())
end

function operations.append()
    entries[#entries + 1] = call('XADD', key(), arg(), 't', arg(), 'p', arg())
end

function operations.append_into()
    operations.append()
    call('HSET', key(), arg(), entries[#entries])
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

function operations.bury()
    local stream, id, dead, tag, payload = key(), arg(), key(), arg(), arg()
    if acknowledge(stream, id) then call('XADD', dead, '*', 't', tag, 'p', payload) end
end

function operations.remove()
    call('XDEL', key(), arg())
end

function operations.notify()
    call(arg(), key(), arg())
end

local function commit(KEYS, ARGV)
    keys, args, k, a = KEYS, ARGV, 0, 0
    tails, limits, versions, entries = {}, {}, {}, {}

    local id, lead = arg(), nil
    if id ~= '' then
        lead = key()
        local last = call('HMGET', lead, 'c', 'cr')
        if last[1] == id then return '=' .. last[2] end
    end
    for check = 0, tonumber(arg()) - 1 do
        local kind, value = checks[arg()]()
        if kind then return redis.error_reply('CONFLICT ' .. check .. ' ' .. kind .. ' ' .. value) end
    end
    for _ = 1, tonumber(arg()) do
        local fault = needs[arg()]()
        if fault then return redis.error_reply('MALFORMED ' .. fault) end
    end

    local now = now_ms()
    for limit, full_at in pairs(limits) do
        local left = math.ceil(full_at / 1000) - now
        call('SET', limit, string.format('%.0f', full_at), 'PX', string.format('%.0f', math.max(left, 1)))
    end
    local last = #args
    while a < last do
        operations[arg()]()
    end
    local result = now .. ';' .. table.concat(versions, ',') .. ';' .. table.concat(entries, ',')
    if lead then call('HSET', lead, 'c', id, 'cr', result) end
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
-- ARGV: consumer, limit, lease in ms (0 = do not look for idle entries), whether to remove forgotten consumers;
-- then, for each stream, the number and ids of entries that were read for this consumer and never reached it.
-- Answers now, ms until an entry may become idle for that long, groups made, and for each entry: position of
-- its stream in KEYS, id, tag, payload, deliveries.
local function claim(KEYS, ARGV)
    local consumer, room, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
    local prune, at = ARGV[4] == '1', 4
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
            if room > 0 then
                for _, row in ipairs(pending_rows(stream, 'IDLE', lease, '-', '+', room)) do
                    -- Entries whose body was deleted leave the list here, and nothing comes back for them.
                    local entry = call('XCLAIM', stream, GROUP, consumer, lease, row[1])[1]
                    if entry then take(position, entry, row[4] + 1) end
                end
            end
            local rows = pending_rows(stream, '-', '+', 100)
            for _, row in ipairs(rows) do
                if row[2] ~= HANDED_BACK then reply[2] = math.min(reply[2], lease - row[3]) end
            end
            if #rows == 100 then reply[2] = math.min(reply[2], math.floor(lease / 3)) end
        end

        if prune then
            for _, facts in ipairs(call('XINFO', 'CONSUMERS', stream, GROUP)) do
                local name, owned, idle = facts[2], facts[4], facts[6]
                if owned == 0 and idle > 3600000 and name ~= HANDED_BACK and name ~= consumer then
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
-- Answers how many moved, and whether some are left.
local function tick(KEYS, ARGV)
    local now, limit, moved, left = now_ms(), tonumber(ARGV[1]), 0, 0
    for n = 1, #KEYS, 3 do
        local stream, due, bodies = KEYS[n], KEYS[n + 1], KEYS[n + 2]
        local ids = call('ZRANGE', due, '-inf', now, 'BYSCORE', 'LIMIT', 0, limit)
        for _, id in ipairs(ids) do
            local body = call('HGET', bodies, id)
            if body then
                call('XADD', stream, '*', 't', byte(body), 'p', string.sub(body, 2))
                moved = moved + 1
            end
            call('ZREM', due, id)
            call('HDEL', bodies, id)
        end
        if #ids == limit then left = 1 end
    end
    return { moved, left }
end

-- KEYS: work stream, its delayed ids. Answers waiting, pending, delayed, id of the oldest waiting entry or ''.
local function depth(KEYS)
    local stream, length, delayed = KEYS[1], call('XLEN', KEYS[1]), call('ZCARD', KEYS[2])
    local given_back, no_group = pending_rows(stream, '-', '+', 1, HANDED_BACK)
    if no_group then
        local first = call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
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
        local first = call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
        oldest = first and first[1] or ''
    end
    local unread = lag or math.max(length - owned - waiting_again, 0)
    return { unread + waiting_again, owned, delayed, oldest }
end

--------------------------------------------------------------------------------------------------------------
-- Indexes

-- Whether x sorts after y by its bytes; `>` would ask the locale.
local function after(x, y)
    for n = 1, math.min(#x, #y) do
        local p, q = byte(x, n), byte(y, n)
        if p ~= q then return p > q end
    end
    return #x > #y
end

-- Rank of (score, member) and whether it is there; when not, the rank that it would have.
local function rank(index, score, member)
    local found = call('ZSCORE', index, member)
    if found and tonumber(found) == tonumber(score) then return call('ZRANK', index, member), true end
    local low = call('ZCOUNT', index, '-inf', '(' .. score)
    local high = low + call('ZCOUNT', index, score, score)
    while low < high do
        local middle = math.floor((low + high) / 2)
        if after(call('ZRANGE', index, middle, middle)[1], member) then high = middle else low = middle + 1 end
    end
    return low, false
end

-- KEYS: index. ARGV: direction, limit, min or '', max or '', then (score, member) to start behind, if any.
-- Answers members and scores, always lowest first.
local function page(KEYS, ARGV)
    local index, limit, min, max, score = KEYS[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
    local first, last = 0, nil
    if min ~= '' then first = call('ZCOUNT', index, '-inf', '(' .. min) end
    if max ~= '' then last = call('ZCOUNT', index, '-inf', max) - 1 end
    local position, there
    if score then position, there = rank(index, score, ARGV[6]) end
    if ARGV[1] == 'up' then
        if score then first = math.max(first, there and position + 1 or position) end
        last = math.min(last or math.huge, first + limit - 1)
    else
        last = last or call('ZCARD', index) - 1
        if score then last = math.min(last, position - 1) end
        first = math.max(first, last - limit + 1)
    end
    if last < first then return {} end
    return call('ZRANGE', index, first, last, 'WITHSCORES')
end

local function register(name, callback, flags)
    redis.register_function { function_name = '@_' .. name, callback = callback, flags = flags }
end

register('commit', commit)
register('release', commit, { 'allow-oom' })
register('claim', claim, { 'allow-oom' })
register('heartbeat', heartbeat, { 'allow-oom' })
register('tick', tick, { 'allow-oom' })
register('depth', depth, { 'no-writes' })
register('page', page, { 'no-writes' })
