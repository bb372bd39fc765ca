-- KEYS req, out   ARGV attempt, owner, index, pos, event, version
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'owner', 'state', 'cancel', 'pos', 'deadline')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] or f[3] ~= 'running' then return 'lost' end
local verdict = place(f[5], f[6], ARGV[3], ARGV[4], now())
if verdict == 'new' then
  redis.call('XADD', KEYS[2], '0-' .. ARGV[4], 'e', ARGV[5])
  redis.call('HSET', KEYS[1], 'pos', ARGV[4], 'v', ARGV[6])
elseif verdict ~= 'there' then
  return verdict
end
if f[4] then return 'cancel' end
return 'ok'
