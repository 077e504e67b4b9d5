"""The pages that come with a kit: for who makes it, who runs the server, and who runs a site."""

from __future__ import annotations

from collections.abc import Sequence

from fl_bn_site.folders import EXCHANGE_PORTS

INSTALL = """\
In a copy of the repository, at the version that the server runs, with Python 3.11 or newer on Linux (some minutes, about 6 GB, most of it
torch; no GPU is needed):

    python3 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e '.[deployment,report,vision]'

Every command below is typed in this folder, with this environment active: in a new terminal first `. REPOSITORY/.venv/bin/activate`, where
REPOSITORY is the copy's folder. `fl-bn: not found` means that this was forgotten."""


def kit_readme(sites: Sequence[str]) -> str:
    rows = "\n".join(f"| `sites/{site}/` | the IT person of {site}, over a channel that keeps it secret | `site.key` |" for site in sites)
    return f"""# Kit

One folder per machine. Each has a GUIDE.md that is all its reader needs, besides a copy of the repository.

| folder | who gets it | its secret, which never goes anywhere else |
|---|---|---|
| `authority/` | nobody: keep it offline; it is needed only to renew the server's certificate | `ca.key` |
| `server/` | the machine that sites connect to | `server.key` |
{rows}

`ca.key` can make servers that all sites trust; `server.key` is the server; a `site.key` is that site. Once a site has its folder, delete
yours.

1. `fl-bn kit verify .` here: all files fit together. Each folder can be verified by itself later, too.
2. Hand out the folders. Every site fills in the data lines of its `site.toml`.
3. On the server: `./start.sh`. Sites, in any order, before or after: `./start.sh`. They wait for each other.
4. `fl-bn doctor .` in each folder says what is wrong where something is.
5. On the server: `./run.sh --run-config "..."`.
"""


def server_guide(fleet: int, exchange: int) -> str:
    return f"""# The server

{INSTALL}

## Start

    fl-bn doctor .      # what is missing, and what to do about it
    ./start.sh          # runs until Ctrl-C, and restarts what ends; at boot: deploy/systemd in the repository

Open for the sites, incoming: TCP {fleet} (Flower) and {exchange} to {exchange + EXCHANGE_PORTS - 1} (the layer-wise exchange, one port per
run that is on: FedTAN needs it, and exact statistics take one message with it, else one per layer; `exchange-ports` in server.toml says how
many). Nothing else: whoever reaches `control` in server.toml can start runs, which is code on the sites' machines, and can let sites in;
`serverappio` is plaintext.

`logs/` has one file per program (14 days, 70 MB each at most). The log says `A: registered` for each site, once, and a site that has
connected is `Activated node_id=...` in `logs/superlink.log`.

## Runs

    ./run.sh --run-config "method='fedbn' rounds=40 dataset='sites' classes=10 channels=3 image-size=32"   # the sites' own data
    ./run.sh --run-config "method='hbn' rounds=3"       # rehearsal: the run's own data, split over the sites that have set none

It shows the run's log and exits with 0 only if the run completed. One run goes on at a time, and others wait in a queue that a restart
does not lose. Ctrl-C leaves the log, not the run.

    fl-bn runs .              # all runs: id, name, state, round, start, seconds
    fl-bn status . --watch    # sites by name, and how far the runs are
    fl-bn abort . RUN         # ends a run, or takes it out of the queue
    fl-bn resume . RUN        # goes on from its last checkpoint (every 5 rounds) with the config in results/RUN; after a crash, too

A round takes some seconds: sites ask twice a second (`poll-seconds` in site.toml). The number of clients, the folder for results and the
exchange's certificate come from this folder. All keys: docs/config.md; metrics and upgrades: docs/how-to/operate.md and upgrade.md.

Results are in `results/`, a folder per run (`summary.md`, `rounds.csv`, `model.safetensors`, ...): copy it from there, it is complete when
the log says `results: ...`.

## Sites that come and go, and what expires

    fl-bn kit add-site . NAME         # makes ../sites/NAME, the folder to hand over; with --public-key FILE the site keeps its own key
    fl-bn kit remove-site . NAME      # at once: it gets no further message, also of a run that goes on
    fl-bn kit renew . --site NAME     # another key for it, if the old one may have been copied
    fl-bn kit renew . --authority FOLDER      # another server certificate; then end ./start.sh and start it again

The server may run meanwhile, and a run may go on. No other site has anything to do. The next run that is submitted has the new sites.
What is replaced stays in a folder `former`.

## Keep

`state/` (who is registered, runs, checkpoints) and `results/` belong in the backup; so does this folder, with `server.key`, encrypted.
`./start.sh` and `./run.sh` say when the certificate ends within 30 days, and `./start.sh` refuses one that has ended.

## When it says ...

* `Activation failed: No SuperNode found with the given public key`: a site whose key is not in `sites/`, or that came before it was
  registered and tries again.
* `could not be activated`: that site crashed, and is let in again after a minute.
* `shut out: no site of server.toml has this key`: a site that was removed, or the former key of one: as it should be.
* `in use`: another server runs here, or other programs have ports of server.toml.
"""


def site_guide(site: str, fleet: str, exchange: str) -> str:
    return f"""# Site {site}

This machine trains on its own data and sends what it learnt to the server at {fleet}. {INSTALL}

## Before the first start

Fill in the data lines of `site.toml` (each line says what it means); paths may be relative to this folder:

    dataset = "npz"           # or: folder (train/CLASS/*.png, test/CLASS/*.png), or package.module:function
    data-path = "site.npz"    # arrays x_train y_train x_test y_test: uint8 images (N, height, width[, channels]), integer labels

Left empty, this site trains on its share of a public data set: a rehearsal. Then:

    fl-bn doctor .      # what is missing, and what to do about it; with the planned run: fl-bn doctor . --run-config "..."

After every change of site.toml: stop and start again. Send the operator what it says of your data (classes, channels, size of the images):
all sites must agree on them.

Outgoing connections that the firewall must allow: TCP to {fleet}, and, for FedTAN and exact statistics, to {exchange} and
the {EXCHANGE_PORTS - 1} ports after it. No incoming ones.

## Start, stop

    ./start.sh          # runs until Ctrl-C or `kill`, and restarts what ends; at boot: deploy/systemd in the repository

It is connected when the log (here, and in `logs/supernode.log`) says `SuperNode ID: ...`. Then it waits for runs: a round begins with
`Receiving: train message` and ends with `Sent successfully` (`query.hello` is the introduction, `evaluate` the test). Stopping takes some
seconds, and is safe at any time: a run waits two minutes for this site (`retry-timeout`) and asks it again, then goes on without it.

Where the method lets each site have a model of its own (FedBN), it is in `state/RUN/clients/` after the run.

## What leaves this site, and what does not

* fl-bn sends: the model's weights after training; means and variances inside the network (BatchNorm statistics), except what the run's
  method keeps here; numbers of samples, also per class unless the run says `share-label-counts=false`; loss and accuracy; what went
  wrong, in words, with names of files; for FedTAN the statistics of single batches, which come close to the samples where batches are
  small.
* It never sends images, single labels, or `site.key`.
* That holds for fl-bn. The program that reads the data comes from the server with each run (Flower works so): who may start runs there
  decides what runs here. Agree on who that is. `policy.toml` says what this site takes part in (methods, memory, only installed code).
  deploy/systemd runs that program as a user who can read the data, and not `site.key`.

## When it says ...

* `No SuperNode found with the given public key`: the server does not know this site. Send its operator `site.pub` (never `site.key`).
* `Connection attempt failed`: the server is down, or a firewall is in between; with `CERTIFICATE_VERIFY_FAILED`: it is not the server
  that `ca.crt` vouches for. `fl-bn doctor .` says more. It retries by itself.
* `Invalid timestamp`: this machine's clock, or the server's, is wrong (5 s ahead of it, or 305 s behind, are refused). Set it right.
* `could not be activated`: after a crash the server counts this site as connected for a minute. Wait, it retries. If that does not
  end, another machine uses this site's key.
* `delete the line partition-id`: site.toml is of an earlier version. The server tells a site its place with every run.
* `the run is for other nodes than this one`: the run was submitted before this site was let in. The next one has it.
* `FolderError`, `DataNotFound`, `ConfigError`: a line of site.toml, or a file that it names, is wrong. The message says which;
  correct it, `fl-bn doctor .`, start again, and ask the operator to submit the run again.

## Keep

`state/` has what must survive this machine (layers that stay here under FedBN and its kin, momentum): back it up, and keep it as secret
as the data. `site.key` is this site: mode 0600, backed up only encrypted. If it may have been copied, tell the operator at once.
"""
