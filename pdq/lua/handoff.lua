-- KEYS req, prefill stream, decode stream, load, out
-- ARGV attempt, owner, group, entry, id, handoff, kv tokens, version, tail key; index, pos, event ('': none)
-- The event, if there is one, becomes visible with the handoff, as by append.
-- Returns the verdict and the KV tokens that wait for decode now.
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'stage', 'cancel', 'cost', 'owner', 'state', 'pos', 'deadline')
if f[1] == ARGV[1] and f[2] == 'decode' then return {'ok', 0} end -- the reply to the first call was lost
if f[1] ~= ARGV[1] or f[5] ~= ARGV[2] or f[6] ~= 'running' then return {'lost', 0} end
if f[3] then return {'cancel', 0} end
local t, pos = now(), f[7]
if ARGV[12] ~= '' then
  local verdict = place(pos, f[8], ARGV[10], ARGV[11], t)
  if verdict == 'new' then pos = ARGV[11] elseif verdict ~= 'there' then return {verdict, 0} end
end
local waiting = redis.call('XLEN', KEYS[3])
if pos ~= f[7] then -- at once with `pos`: if the rest is refused, the event is visible, once
  redis.call('XADD', KEYS[5], '0-' .. pos, 'e', ARGV[12])
  redis.call('HSET', KEYS[1], 'pos', pos, 'v', ARGV[8])
end
local entry = redis.call('XADD', KEYS[3], '*', 'id', ARGV[5])
redis.call('HSET', KEYS[1], 'stage', 'decode', 'state', 'queued', 'entry', entry, 'owner', '', 'tries', 0,
  'v', ARGV[8], 'handoff', ARGV[6], 'held', ARGV[7], 'tail', ARGV[9], 't_handoff', t)
leave(KEYS[2], ARGV[3], ARGV[4])
if waiting == 0 then redis.call('HDEL', KEYS[4], 'held') end -- whatever a lost key may have left in the sum
less(KEYS[4], 'queued', f[4] or 0)
return {'ok', redis.call('HINCRBY', KEYS[4], 'held', ARGV[7])}
