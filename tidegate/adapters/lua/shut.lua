-- Shuts this server until it is adopted. ARGV: its run id, the run id and term of the last adoption.
local actual, adopted, adopted_term = identity()
if actual ~= ARGV[1] or adopted ~= ARGV[2] or adopted_term ~= ARGV[3] then
  return {'conflict'}
end
redis.call('HSET', STORE, 'run_id', '')
return {'ok'}
