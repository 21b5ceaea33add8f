-- What runs an attempt is its backend; an engine is what trains.
ALTER TABLE attempts RENAME COLUMN engine TO backend;
ALTER TABLE attempts RENAME COLUMN engine_ref TO backend_ref;
UPDATE attempts SET end_reason = replace(end_reason, 'engine_', 'backend_');
UPDATE jobs SET end_reason = replace(end_reason, 'engine_', 'backend_');
UPDATE steps SET outcome = replace(outcome, 'engine_', 'backend_');
UPDATE alerts SET rule = replace(rule, 'engine', 'backend') WHERE rule IN
    ('no_engine', 'engine_gone', 'engine_cannot_train', 'engine_back', 'job_engine_gone');
