-- Prefixed to the other scripts. The store's own hash has run_id and term of the last adoption. It is none of KEYS where
-- a script writes other tables: then the caller needs no right to write it.
local STORE = '{tidegate}:store'

-- A script compares the run id of the server that executes it. So a server that restarted, or a replica that was
-- promoted, refuses until it is adopted.
local function identity()
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local adopted = redis.call('HMGET', STORE, 'run_id', 'term')
  return run_id, adopted[1] or '', adopted[2] or '0'
end

-- nil, or the answer to a client whose session (run id, term) differs from the one that the store is open under.
local function refusal(run_id, term)
  local actual, adopted, adopted_term = identity()
  if actual == run_id and adopted == run_id and adopted_term == term then
    return nil
  end
  return {'refused', actual, adopted, adopted_term}
end

-- A cell is (index of the table's key in KEYS, field, '1' and a value or '0' and '').
local function as_expected(first, last)
  for i = first, last, 4 do
    local found = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
    if ARGV[i + 2] == '1' then
      if found ~= ARGV[i + 3] then return false end
    elseif found then
      return false
    end
  end
  return true
end

local function write(first, last)
  for i = first, last, 4 do
    local key = KEYS[tonumber(ARGV[i])]
    if ARGV[i + 2] == '1' then
      redis.call('HSET', key, ARGV[i + 1], ARGV[i + 3])
    else
      redis.call('HDEL', key, ARGV[i + 1])
    end
  end
end
