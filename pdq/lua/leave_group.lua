-- KEYS stream...   ARGV group, consumer
-- Deleting a consumer drops its pending entries, so only one without any is deleted.
local gone = 0
for i = 1, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err and #pending == 0 then
    redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    gone = gone + 1
  end
end
return gone
