-- KEYS req, out, stream, dead
-- ARGV group, entry, owner, id, stage, max_tries, ttl, dead_letters, event: cancelled, event: deadline, event: dead
-- The entry must be in this worker's pending list: it may have been reclaimed since it was read.
local pending = redis.call('XPENDING', KEYS[3], ARGV[1], ARGV[2], ARGV[2], 1)
if #pending == 0 or pending[1][2] ~= ARGV[3] then return {'lost'} end
local f = redis.call('HMGET', KEYS[1], 'stage', 'entry', 'cancel', 'deadline', 'tries', 'attempt')
if f[1] ~= ARGV[5] or f[2] ~= ARGV[2] then
  leave(KEYS[3], ARGV[1], ARGV[2])
  return {'gone'}
end
local t = now()
local ended
if f[3] then
  ended = {'cancelled', ARGV[9]}
elseif t > tonumber(f[4]) then
  ended = {'deadline', ARGV[10]}
elseif tonumber(f[5]) >= tonumber(ARGV[6]) then
  ended = {'dead', ARGV[11]}
  dead_letter(KEYS[4], ARGV[8], ARGV[4], ARGV[5], f[5], 'worker died or lost its lease')
end
if ended then
  leave(KEYS[3], ARGV[1], ARGV[2])
  finish(KEYS[1], KEYS[2], ended[2], ended[1], ARGV[7])
  return {ended[1]}
end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
redis.call('HINCRBY', KEYS[1], 'tries', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[3], 'state', 'running', 't_' .. ARGV[5], t)
local g = redis.call('HMGET', KEYS[1], 'msg', 'handoff', 'pos', 't_submit', 't_prefill', 't_handoff', 'requeues')
return {'ok', attempt, g[1] or '', g[2] or '', tonumber(g[3]), f[4] - t, tonumber(g[4] or t), tonumber(g[5] or t),
  tonumber(g[6] or t), t, tonumber(g[7] or 0)}
