-- The first schema. Statements of a migration run in one transaction, with foreign keys not enforced; a
-- later schema is a further file, 0002_name.sql, and database.SCHEMA_VERSION is its number.
--
-- Times are seconds since the epoch (UTC). Hotkeys are stored in the network's own spelling (prefix 42), so
-- that one key has one row. Requests are kept as received, with any fields that a newer validator adds.

-- An offer as first received; a repeat only changes last_seen_at and times_seen.
CREATE TABLE offers (
    id INTEGER PRIMARY KEY,
    validator TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_type TEXT NOT NULL,
    model TEXT NOT NULL,
    params INTEGER,
    hours REAL NOT NULL,
    ds_size INTEGER,
    received_at REAL NOT NULL,
    last_seen_at REAL NOT NULL,
    times_seen INTEGER NOT NULL,
    raw BLOB NOT NULL,
    decision_id INTEGER,  -- the decision that stands: the one last sent
    UNIQUE (validator, task_id)
);
CREATE INDEX ix_offers_received_at ON offers (received_at);
CREATE INDEX ix_offers_decision_id ON offers (decision_id);

-- A started task: one per validator and task_id, however often the start is repeated.
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    validator TEXT NOT NULL,
    task_type TEXT NOT NULL,
    model TEXT NOT NULL,
    hours REAL NOT NULL,
    expected_repo_name TEXT,
    state TEXT NOT NULL,
    end_reason TEXT,
    detail TEXT NOT NULL DEFAULT '',  -- for people: where the end reason came from, or what the job waits for
    counted_from INTEGER NOT NULL DEFAULT 0,  -- attempts up to this number do not count: the job was reopened
    ended_at REAL,
    started_at REAL NOT NULL,
    deadline_at REAL NOT NULL,
    starts INTEGER NOT NULL,  -- how often the start was sent; the newest repository name and deadline count
    request BLOB NOT NULL,
    submission_repo TEXT,
    submission_hash TEXT,
    submitted_at REAL,
    lock_token INTEGER NOT NULL,  -- changes with every change of the row; an older one may not write
    updated_at REAL NOT NULL,
    UNIQUE (validator, task_id)
);
CREATE INDEX ix_jobs_state ON jobs (state);

-- A decision about an offer, or about a start without an accepted offer. Equal offers share a refusal, which
-- then names none of them; the offers name it.
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    offer_id INTEGER REFERENCES offers (id),
    job_id INTEGER REFERENCES jobs (id),
    accepted INTEGER NOT NULL,
    message TEXT NOT NULL,
    score REAL,
    factors TEXT NOT NULL,  -- JSON object: factor name to value and contribution
    reasons TEXT NOT NULL,  -- JSON list: the result of each rule
    details TEXT NOT NULL,  -- JSON object: what has no column of its own, such as the placement
    policy TEXT NOT NULL,
    policy_hash TEXT NOT NULL,
    profile_hash TEXT,
    decided_at REAL NOT NULL
);
CREATE INDEX ix_decisions_offer_id ON decisions (offer_id);
CREATE INDEX ix_decisions_job_id ON decisions (job_id);
CREATE INDEX ix_decisions_shared ON decisions (decided_at) WHERE offer_id IS NULL AND job_id IS NULL;

-- The GPUs and the time window that a task has or had: one row per task. What is free is decided in memory;
-- this is what a restart reads.
CREATE TABLE reservations (
    validator TEXT NOT NULL,
    task_id TEXT NOT NULL,
    offer_id INTEGER REFERENCES offers (id),  -- NULL: started without an offer
    state TEXT NOT NULL,
    gpus TEXT NOT NULL,  -- JSON list of GPU ids; empty for a job that has no GPUs yet
    starts_at REAL NOT NULL,
    ends_at REAL NOT NULL,
    priority REAL NOT NULL,
    firm INTEGER NOT NULL,  -- accepted: its window stands. A start that was not accepted waits in the queue
    held_at REAL NOT NULL,
    lapses_at REAL NOT NULL,  -- an offer's reservation is released if no start has come by then
    PRIMARY KEY (validator, task_id)
);
CREATE INDEX ix_reservations_state ON reservations (state);
CREATE INDEX ix_reservations_offer_id ON reservations (offer_id);

-- One attempt at a job, with a directory of its own. The row is written before the engine is called.
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    job_id INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    engine TEXT NOT NULL,
    key TEXT NOT NULL,  -- the name in the engine, never used twice
    engine_ref TEXT,
    folder TEXT NOT NULL,
    gpus TEXT NOT NULL,  -- JSON list of the ids of its GPUs
    started_at REAL NOT NULL,
    end_by REAL,  -- the end that the trainer is given: its last save is over by then
    ended_at REAL,
    end_reason TEXT,
    detail TEXT NOT NULL DEFAULT '',
    UNIQUE (job_id, number)
);

-- A piece of work on a job, written before it begins and after it ends.
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    job_id INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER,  -- the attempt it belongs to, if any
    name TEXT NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,  -- 'ok', an end reason, or 'interrupted': the daemon stopped in the middle
    detail TEXT NOT NULL DEFAULT ''
);
CREATE INDEX ix_steps_job_id ON steps (job_id);

-- What runs of one shape have taught, for the next plan of that shape.
CREATE TABLE lessons (
    shape TEXT PRIMARY KEY NOT NULL,
    learned TEXT NOT NULL,  -- JSON of core.planning.calibration.LearnedBounds
    updated_at REAL NOT NULL
);

-- What happened, in order: the operator's history, and what alerts are sent from.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT,
    data TEXT NOT NULL  -- JSON object
);
CREATE INDEX ix_events_task_id ON events (task_id);
CREATE INDEX ix_events_at ON events (at);

-- A used nonce, until it could no longer be replayed.
CREATE TABLE nonces (
    signer BLOB NOT NULL,
    nonce TEXT NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (signer, nonce)
) WITHOUT ROWID;
CREATE INDEX ix_nonces_expires_at ON nonces (expires_at);
