-- KEYS load, dead, took, stream...
-- ARGV version, group, owner, stage, max_tries, lease_ms, ttl, dead_letters, events: cancelled, deadline, queue_deadline,
--      dead; nonce of the call, prefix of req keys, prefix of out keys, most new entries; then of each entry that was read
--      before: number of its stream, entry, id
-- Claims those entries, and up to so many new ones, those of the first streams first.
-- Returns of each entry: number of its stream, entry, id, and what the claim came to: {'ok', ...} for a job, {why} if
-- there is nothing to do, {'error', text}. The new ones are noted under `took`, so that the same call, sent again after a
-- lost reply, answers the same. (The keys of the requests are not named by KEYS, but have their hash tag.)
local stage, nonce = ARGV[4], ARGV[13]
even_at_maxmemory(KEYS[1])

local function job(f, out, attempt, claimed, time)
  local events = {}
  if f[13] ~= '0' then -- mostly token 0: spares decode a question
    for i, e in ipairs(redis.call('XRANGE', out, '-', '+', 'COUNT', 16)) do events[i] = e[2][2] end
  end
  local handoff = stage == 'decode' and f[12] or ''
  return {'ok', attempt, f[11] or '', handoff, tonumber(f[13]), f[4] - time, tonumber(f[14] or claimed),
    tonumber(f[15] or claimed), tonumber(f[16] or claimed), claimed, tonumber(f[18] or 0), events}
end

-- new: read by this script; else the entry may have been reclaimed since it was read.
local function claim(stream, entry, id, new)
  local req, out = ARGV[14] .. id, ARGV[15] .. id
  if not new then
    local pending = redis.call('XPENDING', stream, ARGV[2], entry, entry, 1)
    if #pending == 0 or pending[1][2] ~= ARGV[3] then return {'lost'} end
  end
  local f = redis.call('HMGET', req, 'stage', 'entry', 'cancel', 'deadline', 'queue_deadline', 'tries', 'attempt', 'v',
    'state', 'claim', 'msg', 'handoff', 'pos', 't_submit', 't_prefill', 't_handoff', 't_' .. stage, 'requeues', 'held')
  local t = now()
  if f[9] == 'running' and f[10] == nonce then -- the reply to the first call was lost
    return job(f, out, tonumber(f[7]), tonumber(f[17]), t)
  end
  if f[1] ~= stage or f[2] ~= entry then
    leave(stream, ARGV[2], entry)
    if not f[1] then redis.call('PEXPIRE', out, ARGV[7]) end -- the request was lost: nobody else ends its replies
    return {'gone'}
  end
  if tonumber(f[8]) > tonumber(ARGV[1]) then
    leave_to_newer(stream, ARGV[2], ARGV[3], entry, ARGV[6])
    return {'newer'}
  end
  local why, event = overdue(f[4], f[5], f[7], t), nil
  if f[3] then
    why, event = 'cancelled', ARGV[9]
  elseif why == 'deadline' then
    event = ARGV[10]
  elseif why == 'queue_deadline' then
    event = ARGV[11]
  elseif tonumber(f[6]) >= tonumber(ARGV[5]) then
    why, event = 'dead', ARGV[12]
    dead_letter(KEYS[2], ARGV[8], id, stage, f[6], 'worker died or lost its lease')
  end
  if event then
    redis.call('HSET', req, 'owner', '') -- whoever still works on it has lost it
    finish(req, out, KEYS[1], event, why, ARGV[7])
    leave(stream, ARGV[2], entry)
    return {why}
  end
  redis.call('HSET', req, 'attempt', f[7] + 1, 'tries', f[6] + 1, 'owner', ARGV[3], 'claim', nonce, 'state', 'running',
    't_' .. stage, t)
  take_held(req, KEYS[1], f[19])
  return job(f, out, f[7] + 1, t, t)
end

local found, new = {}, {}
-- An error over one request is no reason to lose the answers for the others.
local function add(n, entry, id, fresh)
  local good, answer = pcall(claim, KEYS[3 + n], entry, id, fresh)
  if not good then
    if type(answer) == 'table' then answer = answer.err end
    answer = {'error', tostring(answer)}
  end
  found[#found + 1] = {n, entry, id, answer}
end

for i = 17, #ARGV, 3 do add(tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2], false) end

local left = tonumber(ARGV[16])
if left <= 0 then return found end
local took = redis.call('GET', KEYS[3])
if took and string.sub(took, 1, #nonce) == nonce then
  for n, entry, id in string.gmatch(string.sub(took, #nonce + 1), '(%d+) (%S+) (%S+)\n') do
    add(tonumber(n), entry, id, false)
  end
  return found
end
for n = 1, #KEYS - 3 do
  local reply = redis.pcall('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', left, 'STREAMS', KEYS[3 + n], '>')
  if reply and reply.err then
    if #found + #new == 0 then return reply end
    break -- what was read is ours already
  end
  for _, e in ipairs(reply and reply[1] and reply[1][2] or {}) do
    left = left - 1
    for i = 1, #e[2], 2 do
      if e[2][i] == 'id' then new[#new + 1] = {n, e[1], e[2][i + 1]} end
    end
  end
  if left <= 0 then break end
end
local notes = {}
for i, e in ipairs(new) do notes[i] = e[1] .. ' ' .. e[2] .. ' ' .. e[3] .. '\n' end
if #new > 0 then redis.call('SET', KEYS[3], nonce .. table.concat(notes), 'PX', 60000) end
for _, e in ipairs(new) do add(e[1], e[2], e[3], true) end
return found
