-- Adopts this server. ARGV: its run id, the run id ('' for none) and term of the last adoption, the new term, cells.
local actual, adopted, adopted_term = identity()
if actual ~= ARGV[1] or adopted ~= ARGV[2] or adopted_term ~= ARGV[3] then
  return {'conflict'}
end
if adopted == actual or tonumber(ARGV[4]) <= tonumber(adopted_term) then
  return {'conflict'}
end
write(5, #ARGV)
redis.call('HSET', STORE, 'run_id', actual, 'term', ARGV[4])
return {'ok'}
