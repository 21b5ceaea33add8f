-- Measurements, alerts, what rules did, and the miner's rank over time.

-- One GPU over one period. NULL: not measured, which is not zero.
CREATE TABLE gpu_rollups (
    period INTEGER NOT NULL,  -- seconds: 60 or 3600
    at INTEGER NOT NULL,  -- when the period began
    gpu TEXT NOT NULL,
    job_id INTEGER,  -- the job that had the GPU longest in the period; NULL: none had it
    watched REAL NOT NULL DEFAULT 1,  -- share of the period in which the daemon ran and knew the GPU
    busy REAL NOT NULL,  -- share of the period in which a job had the GPU: `watched` less `busy` it was idle
    samples INTEGER NOT NULL,
    utilization REAL,  -- mean share of the time in which a kernel ran
    memory REAL,  -- highest share of the memory in use
    temperature REAL,  -- highest, in degrees Celsius
    power REAL,  -- mean, in watts
    clock REAL,  -- mean share of the highest SM clock
    throttled REAL,  -- share of the samples in which heat, power or the hardware held the clocks down
    tensor REAL,  -- mean share of the time in which the tensor cores worked
    dram REAL,  -- mean share of the memory bandwidth
    pcie REAL,  -- mean bytes per second, both directions
    nvlink REAL,
    PRIMARY KEY (period DESC, at, gpu)  -- minutes last: they are appended, and fill their pages
) WITHOUT ROWID;

-- What one attempt's training reached. Its progress file is shortened when the job's files are removed.
CREATE TABLE attempt_figures (
    attempt_id INTEGER PRIMARY KEY REFERENCES attempts (id),
    figures TEXT NOT NULL,  -- JSON of miner.jobs.figures.AttemptFigures
    curves TEXT NOT NULL  -- JSON object: thinned series over steps
);

-- An alert from when it was raised until it was resolved.
CREATE TABLE alerts (
    id INTEGER PRIMARY KEY,
    rule TEXT NOT NULL,  -- a rule of alerts.yaml, or an AlertKind
    subject TEXT NOT NULL,  -- 'miner', 'host', 'gpu:ID' or 'job:ID'
    severity TEXT NOT NULL,
    text TEXT NOT NULL,
    value REAL,
    raised_at REAL NOT NULL,
    last_at REAL NOT NULL,
    times INTEGER NOT NULL,
    resolved_at REAL,
    notify INTEGER NOT NULL DEFAULT 0,  -- whether somebody is to be notified of it, and of its end
    notified_at REAL  -- when that was done last; before `resolved_at`: not of its end yet
);
CREATE INDEX ix_alerts_open ON alerts (rule, subject) WHERE resolved_at IS NULL;
CREATE INDEX ix_alerts_raised_at ON alerts (raised_at);

-- What a rule asked of a running training, and what came of it.
CREATE TABLE actions (
    id INTEGER PRIMARY KEY,
    rule TEXT NOT NULL,
    job_id INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,  -- 'batch' or 'duty'
    asked_at REAL NOT NULL,
    before TEXT NOT NULL,  -- JSON object: the numbers that the rule goes by, and what is changed
    after TEXT,
    outcome TEXT NOT NULL,  -- 'asked', 'applied', 'kept', 'undone', 'refused' or 'next attempt'
    detail TEXT NOT NULL DEFAULT '',
    ended_at REAL
);
CREATE INDEX ix_actions_job_id ON actions (job_id);

-- Alerts that nobody is to be notified of.
CREATE TABLE silences (
    id INTEGER PRIMARY KEY,
    rule TEXT NOT NULL,  -- a pattern like 'gpu-*'
    subject TEXT NOT NULL,  -- likewise
    reason TEXT NOT NULL,
    created_at REAL NOT NULL,
    until REAL NOT NULL
);

-- The miner's place in the subnet: one row per change, and one per hour.
CREATE TABLE ranks (
    at REAL PRIMARY KEY NOT NULL,
    block INTEGER,
    uid INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    miners INTEGER NOT NULL,
    incentive REAL NOT NULL,
    emission REAL NOT NULL
) WITHOUT ROWID;

-- Reports that were sent, so that none is sent twice.
CREATE TABLE sent_reports (
    period TEXT NOT NULL,
    begins_at REAL NOT NULL,
    sent_at REAL NOT NULL,
    PRIMARY KEY (period, begins_at)
) WITHOUT ROWID;
