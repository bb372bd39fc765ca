-- KEYS req, out, stream, dead, load
-- ARGV version, group, entry, owner, id, stage, max_tries, lease_ms, ttl, dead_letters,
--      events: cancelled, deadline, queue_deadline, dead; nonce of the call
even_at_maxmemory(KEYS[1])
-- The entry must be in this worker's pending list: it may have been reclaimed since it was read.
local pending = redis.call('XPENDING', KEYS[3], ARGV[2], ARGV[3], ARGV[3], 1)
if #pending == 0 or pending[1][2] ~= ARGV[4] then return {'lost'} end
local function claimed()
  local g = redis.call('HMGET', KEYS[1], 'attempt', 'msg', 'handoff', 'pos', 'deadline', 't_submit', 't_prefill',
    't_handoff', 't_' .. ARGV[6], 'requeues')
  local t, events = tonumber(g[9]), {}
  if g[4] ~= '0' then -- mostly token 0: spares decode a question
    for i, e in ipairs(redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 16)) do events[i] = e[2][2] end
  end
  return {'ok', tonumber(g[1]), g[2] or '', g[3] or '', tonumber(g[4]), g[5] - now(), tonumber(g[6] or t),
    tonumber(g[7] or t), tonumber(g[8] or t), t, tonumber(g[10] or 0), events}
end
local f = redis.call('HMGET', KEYS[1], 'stage', 'entry', 'cancel', 'deadline', 'queue_deadline', 'tries', 'attempt', 'v',
  'state', 'claim')
if f[9] == 'running' and f[10] == ARGV[15] then return claimed() end -- the reply to the first call was lost
if f[1] ~= ARGV[6] or f[2] ~= ARGV[3] then
  leave(KEYS[3], ARGV[2], ARGV[3])
  if not f[1] then redis.call('PEXPIRE', KEYS[2], ARGV[9]) end -- the request was lost: nobody else ends its replies
  return {'gone'}
end
if tonumber(f[8]) > tonumber(ARGV[1]) then
  leave_to_newer(KEYS[3], ARGV[2], ARGV[4], ARGV[3], ARGV[8])
  return {'newer'}
end
local t = now()
local why = overdue(f[4], f[5], f[7], t)
local event
if f[3] then
  why, event = 'cancelled', ARGV[11]
elseif why == 'deadline' then
  event = ARGV[12]
elseif why == 'queue_deadline' then
  event = ARGV[13]
elseif tonumber(f[6]) >= tonumber(ARGV[7]) then
  why, event = 'dead', ARGV[14]
  dead_letter(KEYS[4], ARGV[10], ARGV[5], ARGV[6], f[6], 'worker died or lost its lease')
end
if event then
  redis.call('HSET', KEYS[1], 'owner', '') -- whoever still works on it has lost it
  leave(KEYS[3], ARGV[2], ARGV[3])
  finish(KEYS[1], KEYS[2], KEYS[5], event, why, ARGV[9])
  return {why}
end
redis.call('HINCRBY', KEYS[1], 'attempt', 1)
redis.call('HINCRBY', KEYS[1], 'tries', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[4], 'claim', ARGV[15], 'state', 'running', 't_' .. ARGV[6], t)
take_held(KEYS[1], KEYS[5])
return claimed()
