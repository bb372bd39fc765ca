-- KEYS req, out, stream, dead, load
-- ARGV attempt, owner, group, entry, id, stage, max_tries, delay_ms, lease_ms, event, why, ttl, dead_letters
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'reason', 'tries', 'owner')
if f[1] == ARGV[1] and f[2] == 'queued' then return 'retry' end -- the reply to the first call was lost
if f[1] == ARGV[1] and f[3] == 'dead' and f[5] == ARGV[2] then return 'dead' end
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
local tries = tonumber(f[4])
if tries < tonumber(ARGV[7]) then
  -- The entry stays pending and looks `lease - delay` old, so that the reclaim of expired leases is the back-off.
  redis.call('XCLAIM', KEYS[3], ARGV[3], ARGV[2], 0, ARGV[4], 'IDLE', ARGV[9] - ARGV[8], 'JUSTID')
  redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '')
  return 'retry'
end
finish(KEYS[1], KEYS[2], KEYS[5], ARGV[10], 'dead', ARGV[12])
dead_letter(KEYS[4], ARGV[13], ARGV[5], ARGV[6], tries, ARGV[11])
leave(KEYS[3], ARGV[3], ARGV[4])
return 'dead'
