-- What is needed to reckon with money, and what operators write on jobs.

-- The kind of each GPU that was ever here: its price goes by it.
CREATE TABLE gpus (
    id TEXT PRIMARY KEY NOT NULL,
    kind TEXT NOT NULL
) WITHOUT ROWID;
ALTER TABLE ranks ADD COLUMN tao_per_day REAL;  -- the emission at the subnet's price of then; NULL: not known
ALTER TABLE jobs ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';  -- JSON list, sorted
ALTER TABLE jobs ADD COLUMN note TEXT NOT NULL DEFAULT '';
