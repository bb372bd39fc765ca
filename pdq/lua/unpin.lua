-- KEYS index of one fingerprint   ARGV pinned until (ms), now (ms), step, hashes...
-- Gives the blocks of a request that has ended the score of now, tails below heads; those that another request has
-- pinned for longer keep theirs.
for i = 4, #ARGV do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score and tonumber(score) <= tonumber(ARGV[1]) then
    redis.call('ZADD', KEYS[1], string.format('%.17g', ARGV[2] - (i - 4) * ARGV[3]), ARGV[i])
  end
end
