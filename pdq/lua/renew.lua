-- KEYS req, stream   ARGV attempt, owner, group, entry
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
-- JUSTID: renewing must not count as a delivery. The claim resets the idle time.
local mine = redis.call('XCLAIM', KEYS[2], ARGV[3], ARGV[2], 0, ARGV[4], 'JUSTID')
if #mine == 0 then return 'lost' end
local f = redis.call('HMGET', KEYS[1], 'cancel', 'deadline')
if f[1] then return 'cancel' end
if now() > tonumber(f[2]) then return 'expired' end
return 'ok'
