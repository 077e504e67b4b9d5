-- The queue of a server: the runs that wait for their turn, and the last ones that were started.
-- fl_bn_site/queue_store.py reads and writes this table.
BEGIN IMMEDIATE;
CREATE TABLE runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice, since somebody may still wait for a run that was removed
    name TEXT NOT NULL,
    config TEXT NOT NULL, -- JSON object: the keys of the run config that the user gave, and the name
    parallel INTEGER NOT NULL,
    submitted TEXT NOT NULL, -- ISO 8601
    state TEXT NOT NULL, -- waiting, starting, started, refused, dropped
    earlier_runs TEXT NOT NULL, -- JSON list of Flower's ids, which do not fit into SQLite's integers
    run TEXT NOT NULL,
    why TEXT NOT NULL,
    submitter TEXT NOT NULL DEFAULT '', -- USER@HOST
    code TEXT NOT NULL DEFAULT '' -- SHA-256 of the app that was sent
);
PRAGMA user_version = 2;
COMMIT;
