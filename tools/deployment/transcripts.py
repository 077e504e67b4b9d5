"""Type an operator's tasks as the guides describe them. Write a page of docs with the outputs and how long each step took.

    python -m tools.deployment.transcripts                             # with Debian's prometheus, or PROMETHEUS=PATH
    python -m tools.deployment.transcripts --only create,watch         # only these tasks; the other tasks keep their sections

The server and the sites have a copy of the repository each, which may be of different versions. The copies are installed as the
guides say, except that they use the packages of this Python, so that nothing large is downloaded. All processes run on this machine.
Every ``fl-bn`` command that is typed must occur in a guide.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np

from fl_bn_site.folders import ServerFolder
from tests.deployment.federation import ROOT, free_ports
from tests.deployment.tls_servers import reissue
from tools.deployment.terminal import ANSI, INSTALL, Terminal, install, lines_of, release

RUN = "method='fedbn' model='mlp' local-steps=2 evaluate-every=2 pictures=false checkpoint-every=1"


def create(t: Terminal) -> None:
    t.say(
        "Guide: [Deploying](../../deploy/README.md). All is on one machine here, so each `site.toml` got a `clientappio` port of its own."
    )
    fleet, control, serverappio, metrics, *more = free_ports(12)
    t.type(f"fl-bn kit create --superlink 127.0.0.1 --sites A,B,C --fleet-port {fleet} --exchange-port {more[4]}")
    t.type("fl-bn kit verify kit", keep="checks")
    server = {"fleet": f"127.0.0.1:{fleet}", "control": f"127.0.0.1:{control}", "serverappio": f"127.0.0.1:{serverappio}"}
    lines_of(t.folder / "kit/server/server.toml", server)
    for site, port in zip("ABC", more, strict=False):
        lines_of(t.folder / f"kit/sites/{site}/site.toml", {"clientappio": f"127.0.0.1:{port}", "device": "cpu"})
    t.spare, t.metrics = more[3], metrics
    t.type("fl-bn doctor kit/server", keep=r"^(warn|fail)|\d ok")
    t.start("fl-bn start kit/server", "server")
    t.sites = ["A", "B", "C"]
    start_sites(t)
    t.online()
    t.type("fl-bn status kit/server")


def again(t: Terminal) -> None:
    """Start the federation that an earlier run of this program left in the folder."""
    t.server = next(name for name in ("new/server", "kit/server") if (t.folder / name).exists())
    t.sites = list(ServerFolder.read(t.folder / t.server).sites)
    t.spare, t.metrics = free_ports(2)
    t.start(f"fl-bn start {t.server}", "server")
    start_sites(t)
    t.online()
    t.taken()


def run(t: Terminal) -> None:
    t.say("Guide: [Separate machines](machines.md#separate-machines).")
    config = f"{RUN} rounds=4 name='first'"
    t.type(f'fl-bn submit kit/server --run-config "{config}"', keep=r"\[round|run \d|results:")
    t.same_bits("first", config)


def audit(t: Terminal) -> None:
    t.say("Guide: [What a site sent](audit.md). Typed at the site `A`, whose officer reads it without the server.")
    out = t.type("fl-bn audit kit/sites/A")
    noted = re.sub(r"\s", "", out.rpartition("has the hash")[2])[:12]
    t.type("fl-bn audit kit/sites/A --run first --message train --rounds 1-2 --csv")
    t.type(f"fl-bn kit verify kit/sites/A --noted {noted}", keep="audit log|checks")
    t.say("What the server says of `A` in the same run:")
    t.type("grep -E '^client|,A,' kit/server/results/first/disclosure.csv")
    t.say("Somebody takes a line out of the log, and puts it back:")
    log = "kit/sites/A/state/audit/audit-000001.jsonl"
    t.type(f"sed -i.kept 3d {log}")
    t.type("fl-bn kit verify kit/sites/A", keep="audit log|checks", code=1)
    t.type(f"mv {log}.kept {log}")
    t.type("fl-bn kit verify kit/sites/A", keep="audit log|checks")


def fourth(t: Terminal) -> None:
    t.say("Guide: [Sites that come and go](machines.md#sites-that-come-and-go-and-what-expires).")
    t.start(f"fl-bn submit kit/server --run-config \"{RUN} rounds=12 name='three'\"", "three")
    t.until("its first round is done", lambda: t.rounds("three") >= 1)
    t.type("fl-bn kit add-site kit/server east")
    lines_of(t.folder / "kit/sites/east/site.toml", {"clientappio": f"127.0.0.1:{t.spare}", "device": "cpu"})
    t.start("fl-bn start kit/sites/east", "sites/east", t.folder / "sites-copy")
    t.sites.append("east")
    t.online()
    t.ended("three", r"\[round (1|2|11|12)/|completed")
    t.type(f"fl-bn submit kit/server --run-config \"{RUN} rounds=2 name='four'\"", keep=r"\[round|run \d")


def remove(t: Terminal) -> None:
    t.say(
        "Guide: [Sites that come and go](machines.md#sites-that-come-and-go-and-what-expires). Rounds are long here, "
        "so that `B` is in the midst of one."
    )
    config = f"{RUN} rounds=3 retry-timeout=10.0 name='without-b'".replace("local-steps=2", "local-steps=3000")
    t.start(f'fl-bn submit kit/server --run-config "{config}"', "without-b")
    log = t.folder / "kit/sites/B/logs/supernode.log"

    def training() -> bool:
        said = [line for line in log.read_text().splitlines() if re.search("(Receiving|Sending): train", line)]
        return bool(t.rounds("without-b")) and "Receiving" in said[-1]

    t.until("round 1 is done, and B trains in the next", training)
    t.type("fl-bn kit remove-site kit/server B")
    removed, when = len(t.received("B")), datetime.now()
    t.shown(f"# that was at {when:%H:%M:%S}")
    t.ended("without-b", r"\[round|site B|completed")
    t.say("B's own side. This is the end of its log; it got no message after its removal:")
    t.shown(f"$ tail -n 9 kit/sites/B/logs/supernode.log    ({(datetime.now() - when).seconds} s after the removal)")
    said = [line for line in log.read_text(errors="replace").splitlines() if line[24:].strip(" INFO:")]
    t.shown(*said[-9:])
    t.type("tail -n 2 kit/sites/B/logs/fl-bn.log")
    t.shown(f"# messages that B received after its removal: {len(t.received('B')) - removed}")
    assert len(t.received("B")) == removed, "B received messages after its removal"
    t.type("fl-bn status kit/server")
    t.stop("sites/B")
    t.sites.remove("B")


def start_sites(t: Terminal) -> None:
    for site in t.sites:
        t.start(f"fl-bn start kit/sites/{site}", f"sites/{site}", t.folder / "sites-copy")


def begun(t: Terminal, name: str) -> str:
    """Start a run of eight rounds, wait until two of them are done, and return its run config."""
    config = f"{RUN} rounds=8 name='{name}'"
    t.start(f'fl-bn submit kit/server --run-config "{config}"', name)
    t.until("two rounds are done", lambda: t.rounds(name) >= 2)
    return config


def abort(t: Terminal) -> None:
    t.say("Guide: [Run a server day by day](operate.md).")
    config = begun(t, "stopped")
    t.type("fl-bn abort kit/server stopped")
    t.ended("stopped", r"run \d+: |go on with it", code=1)
    t.type("fl-bn runs kit/server")
    t.type("fl-bn resume kit/server stopped", keep=r"going on|\[round [78]/|completed")
    t.same_bits("stopped", config)


def death(t: Terminal) -> None:
    t.say("Guide: [A run that ended early](operate.md#a-run-that-ended-early).")
    config = begun(t, "died")
    t.stop("server", kill=True)
    submit = t.started.pop("died")
    submit.terminate()
    submit.wait(60)
    t.start("fl-bn start kit/server", "server")
    t.online()
    t.type("fl-bn resume kit/server", keep=r"waits|going on|\[round [78]/|completed")
    t.same_bits("died", config)


def renew(t: Terminal) -> None:
    t.say(
        "Guide: [Sites that come and go](machines.md#sites-that-come-and-go-and-what-expires). For this page the server's "
        "certificate was replaced by one that ended a second ago. The authority is kept elsewhere, else `fl-bn start` renews by itself."
    )
    t.stop("server")
    reissue(t.folder / "kit", ["127.0.0.1"], begins=-2, ends=-1 / 86400)
    t.type("mv kit/authority authority")  # beside the server, `fl-bn start` would renew the certificate by itself
    t.type("fl-bn start kit/server", code=2)
    t.type("fl-bn doctor kit/server", keep="^fail", code=1)
    t.type("fl-bn kit renew kit/server --authority authority")
    t.type("mv authority kit/authority")
    t.start("fl-bn start kit/server", "server")
    t.online()
    t.type(f"fl-bn submit kit/server --run-config \"{RUN} rounds=1 name='renewed'\"", keep=r"\[round|run \d")


def tables(t: Terminal) -> None:
    t.say("Guide: [Tables](tables.md). `tables.py` is the first block of that page. Every site gets a file of its own.")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/tables.md").read_text(), re.S)
    (t.folder / "tables.py").write_text(blocks[0])
    t.type(f"{sys.executable} tables.py")
    t.type("fl-bn data columns hospitals --target ill > hospitals/columns.toml")
    for site, name in zip(t.sites, ("north", "south", "west"), strict=False):
        t.type(f"cp hospitals/{name}.csv hospitals/columns.toml kit/sites/{site}/")
    out = t.type("fl-bn data check csv --path kit/sites/A/north.csv")
    keys = re.search(r"has (dataset='sites' .*)", out)
    assert keys is not None
    with_own_data(t, {site: ("csv", f"{name}.csv") for site, name in zip(t.sites, ("north", "south", "west"), strict=False)})
    t.type("fl-bn doctor kit/sites/A", keep="data|^fail")
    config = f"{keys[1]} model='mlp' task='classification-auc' method='fedbn' rounds=3 name='tables'"
    t.type(f'fl-bn submit kit/server --run-config "{config}"', keep=r"\[round|run \d|results:")


def images(t: Terminal) -> None:
    t.say("Guide: [Every site has its own](data.md#every-site-has-its-own). Every site has a folder of images, in folders by class.")
    for number, site in enumerate(t.sites):
        for split, count in (("train", 24), ("test", 8)):
            for label in ("cat", "dog"):
                make_images(t.folder / f"kit/sites/{site}/images/{split}/{label}", count, bright=label == "cat", seed=number)
    t.type("ls -R kit/sites/A/images | head -8")
    with_own_data(t, dict.fromkeys(t.sites, ("folder", "images")))
    t.type("fl-bn doctor kit/sites/A", keep="data|^fail")
    config = "dataset='sites' classes=2 channels=3 image-size=32 method='fedbn' rounds=3 name='images'"
    t.type(f'fl-bn submit kit/server --run-config "{config}"', keep=r"\[round|run \d|results:")
    with_own_data(t, dict.fromkeys(t.sites, ("", "")))


def make_images(folder: Path, count: int, bright: bool, seed: int) -> None:
    """Write ``count`` noisy images of 32 pixels: bright ones, or dark ones."""
    from PIL import Image

    rng = np.random.default_rng([seed, bright, count])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = rng.normal(150 if bright else 100, 50, (32, 32, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")


def with_own_data(t: Terminal, data: Mapping[str, tuple[str, str]]) -> None:
    """Write ``data`` (site -> data set and path) into the sites' site.toml, and start these sites again."""
    for site, (dataset, path) in data.items():
        lines_of(t.folder / f"kit/sites/{site}/site.toml", {"dataset": dataset, "data-path": path})
        t.shown(f'# in kit/sites/{site}/site.toml: dataset = "{dataset}", data-path = "{path}"')
        t.stop(f"sites/{site}")
    start_sites(t)
    time.sleep(5)  # the server counts them as here until they have gone
    t.online()


def own_app(t: Terminal) -> None:
    t.say(
        "Guide: [A Flower app of your own](own-code.md#a-flower-app-of-your-own). It travels with the run, which the kit's submitter signs."
    )
    t.type("fl-bn new myapp", keep="myapp")
    t.type('fl-bn submit kit/server --app myapp --run-config "num-server-rounds=3"', keep=r"\[round|round \d|run \d")
    t.type("grep -c 'imports it anew' kit/sites/A/logs/clientapp.log", code=1)


def installed(t: Terminal) -> None:
    t.say(
        "Guide: [Code that is installed at the sites](own-code.md#code-that-is-installed-at-the-sites). No site trusts a submitter now. "
        "`mynets.py` is that of [Your own network](network.md#on-the-command-line), and lies at every site and with the submitter."
    )
    network = re.search(r"```python\n# mynets.py\n(.*?)```", (ROOT / "docs/how-to/network.md").read_text(), re.S)
    assert network is not None
    for folder in (t.folder / "own", *(t.folder / f"kit/sites/{site}/modules" for site in t.sites)):
        folder.mkdir(exist_ok=True)
        (folder / "mynets.py").write_text(network[1])
    for site in t.sites:
        policy = t.folder / f"kit/sites/{site}/policy.toml"
        policy.write_text(policy.read_text().replace('allow-code = "signed"', 'allow-code = "installed"'))
        toml = t.folder / f"kit/sites/{site}/site.toml"
        text = re.sub(r"(?m)^code = .*$", 'code = ["modules"]', toml.read_text())
        toml.write_text(re.sub(r"(?m)^allow-modules = .*$", 'allow-modules = "mynets"', text))
        t.stop(f"sites/{site}")
    t.type("grep -E '^(code|allow-modules) ' kit/sites/A/site.toml; grep '^allow-code' kit/sites/A/policy.toml")
    start_sites(t)
    time.sleep(5)
    t.online()
    config = "model='mynets:build' method='fbn' rounds=2 name='installed'"
    t.type(f'fl-bn submit kit/server --app own --run-config "{config}"', keep=r"\[round|run \d|results:")
    t.say("The app of `fl-bn new` is refused under this policy:")
    t.type("fl-bn new otherapp", keep="otherapp")
    t.type('fl-bn submit kit/server --app otherapp --run-config "num-server-rounds=1"', keep=r"refused|policy|run \d", code=1)
    for site in t.sites:
        policy = t.folder / f"kit/sites/{site}/policy.toml"
        policy.write_text(policy.read_text().replace('allow-code = "installed"', 'allow-code = "signed"'))


def stolen(t: Terminal) -> None:
    t.say("Guide: [When a key is stolen](stolen-keys.md#the-servers-key). Somebody has copied `server.key`.")
    t.type("fl-bn kit renew kit/server --stolen")
    time.sleep(5)
    t.until("the SuperLink and the SuperNodes were started again", lambda: (t.folder / "kit/server/former").exists())
    time.sleep(60)  # the server counts the sites as here until they have gone
    t.online()
    t.type("grep 'has changed' kit/server/logs/fl-bn.log kit/sites/A/logs/fl-bn.log")
    t.type(f"fl-bn submit kit/server --run-config \"{RUN} rounds=2 name='after'\"", keep=r"\[round|run \d")


def watch(t: Terminal) -> None:
    prometheus = os.environ.get("PROMETHEUS", "prometheus")
    t.say(
        "Guide: [Metrics for Prometheus](operate.md#metrics-for-prometheus). The configuration is the guide's, with another port. "
        "It asks every five seconds."
    )
    t.start(f"fl-bn status {t.server} --serve {t.metrics}", "metrics")
    found = re.search(r"```text\n(scrape_configs:.*?)```", t.guides["docs/how-to/operate.md"], re.S)
    assert found is not None
    text = "global:\n  scrape_interval: 5s\n" + found[1].replace("127.0.0.1:9096", f"127.0.0.1:{t.metrics}")
    (t.folder / "prometheus.yml").write_text(text)
    (port,) = free_ports(1)
    version = subprocess.run([prometheus, "--version"], capture_output=True, text=True, check=True)
    t.shown("$ prometheus --version", (version.stdout + version.stderr).splitlines()[0], "$ cat prometheus.yml", *text.splitlines())
    with (t.folder / "prometheus.out").open("wb") as output:
        t.started["prometheus"] = subprocess.Popen(
            [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=prometheus-data", f"--web.listen-address=127.0.0.1:{port}"],
            cwd=t.folder, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    t.start(f"fl-bn submit kit/server --run-config \"{RUN} rounds=24 name='watched'\"", "watched")
    t.until("two rounds are done", lambda: t.rounds("watched") >= 2)
    t.say("`fl-bn status kit/server --watch` for 45 s; every third of its pictures:")
    frames = t.folder / "watch.out"
    typed, terminal = "stty cols 150; timeout -s INT 45 fl-bn status kit/server --watch", t.environment() | {"TERM": "xterm"}
    argv = ["script", "-qec", typed, str(frames)]
    subprocess.run(argv, cwd=t.folder, env=terminal, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    pictures = [f"  {part}" for part in re.split(r"(?=127\.0\.0\.1:\d+, 20)", ANSI.sub("", frames.read_text(errors="replace")))[1:]]
    assert pictures, "fl-bn status --watch showed nothing"
    for picture in pictures[::3][:3]:
        t.shown(*(line for line in picture.splitlines() if line.strip() and "Script" not in line), "")
    t.say("What Prometheus has of it:")
    for query in (
        "up", "fl_bn_up", "fl_bn_sites_online", "fl_bn_site_online", 'fl_bn_run_round{run="watched"}', 'fl_bn_run_loss{run="watched"}',
        'fl_bn_run_metric{run="watched"}', 'fl_bn_run_left_seconds{run="watched"}', 'fl_bn_run_replies_used{run="watched"}',
    ):  # fmt: skip
        t.shown(f"$ curl -G 127.0.0.1:{port}/api/v1/query --data-urlencode 'query={query}'")
        t.shown(*(f"{_labels(one['metric'])} {one['value'][1]}" for one in _asked(port, f"query?query={quote(query)}")))
    t.ended("watched", "completed")
    time.sleep(5)
    t.say("The rounds of that run over time, as Prometheus kept them:")
    end = time.time()
    query = 'fl_bn_run_round{run="watched"}'
    t.shown(f"$ curl -G 127.0.0.1:{port}/api/v1/query_range --data-urlencode 'query={query}' -d start=... -d end=... -d step=10")
    (series,) = _asked(port, f"query_range?query={quote(query)}&start={end - 240}&end={end}&step=10")
    values = [f"{datetime.fromtimestamp(at):%H:%M:%S}={value}" for at, value in series["values"]]
    t.shown(*(" ".join(values[begin : begin + 10]) for begin in range(0, len(values), 10)))
    for name in ("prometheus", "metrics"):
        t.stop(name)


def _asked(port: int, what: str) -> list[dict[str, Any]]:
    with urlopen(f"http://127.0.0.1:{port}/api/v1/{what}", timeout=20) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def _labels(metric: dict[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in metric.items() if name not in ("__name__", "job", "instance"))
    return f"{metric.get('__name__', '')}{f'{{{inside}}}' if inside else ''}"


def restore(t: Terminal) -> None:
    t.say(
        "Guide: [Another machine for the server](upgrade.md#another-machine-for-the-server). The new machine is another folder, with "
        "other ports of its own. The address by which sites reach the server leads to it. The old folder is moved away first. "
        "A run is left unfinished, to go on there."
    )
    config = begun(t, "moved")
    t.type("fl-bn abort kit/server moved")
    t.ended("moved", r"run \d+: ", code=1)
    t.stop("server")
    t.type("tar -czf backup.tgz -C kit server; mv kit/server lost; mkdir new; tar -xzf backup.tgz -C new; du -sh backup.tgz")
    control, serverappio = free_ports(2)
    lines_of(t.folder / "new/server/server.toml", {"control": f"127.0.0.1:{control}", "serverappio": f"127.0.0.1:{serverappio}"})
    t.type("fl-bn kit verify new/server", keep="checks")
    t.server = "new/server"
    t.start("fl-bn start new/server", "server")
    t.online()
    t.type("fl-bn runs new/server")
    t.type("fl-bn fetch new/server moved copied")
    t.type("fl-bn resume new/server moved", keep=r"going on|\[round [78]/|completed")
    t.same_bits("moved", config)


def upgrade(t: Terminal) -> None:
    t.say(
        "Guide: [Upgrade the server and its sites](upgrade.md). Version 0.2.0 is this one with another number. Server and sites have "
        "a copy of the repository each."
    )
    release(t.folder / "origin", "0.2.0")
    t.type(f"fl-bn runs {t.server}")
    t.stop("server")
    t.type(f"tar -czf before-0.2.0.tgz {t.server}")
    upgraded = f"git fetch -q --tags; git checkout -q v0.2.0; {INSTALL}"
    t.type(f"cd server-copy; {upgraded}", keep="^$")
    t.type(f"fl-bn kit verify {t.server}", keep="checks")
    t.start(f"fl-bn start {t.server}", "server")
    t.online()
    t.say("A run before the sites are upgraded is refused, with both versions:")
    submit = f"fl-bn submit {t.server} --run-config \"method='fedavg' rounds=1 pictures=false wait-timeout=20.0\""
    t.type(submit, keep=r"refused|cannot take part|failed", code=1)
    for site in t.sites:
        t.stop(f"sites/{site}")
    t.type(f"cd sites-copy; {upgraded}", keep="^$", copy=t.folder / "sites-copy")
    start_sites(t)
    time.sleep(5)  # the server counts them as here until they have gone
    t.online()
    t.type(submit, keep=r"\[round|run \d")


TASKS: dict[str, tuple[str, Callable[[Terminal], None]]] = {
    "create": ("Create a federation of three sites", create),
    "run": ("A run", run),
    "audit": ("A site's officer reads what left", audit),
    "fourth": ("A fourth site comes while a run goes on", fourth),
    "remove": ("Remove a site while it trains", remove),
    "abort": ("Abort a run, and go on with it", abort),
    "death": ("Resume after the server's death", death),
    "renew": ("Renew a certificate that has expired", renew),
    "tables": ("Every site has a CSV file", tables),
    "images": ("Every site has a folder of images", images),
    "app": ("An app of `fl-bn new`", own_app),
    "installed": ("Code that is installed at the sites", installed),
    "stolen": ("The server's key is stolen", stolen),
    "watch": ("Watch a run, and scrape it by Prometheus", watch),
    "restore": ("Back up the server, and restore it on a new machine", restore),
    "upgrade": ("Upgrade", upgrade),
}
HEAD = """# An operator's tasks, typed

`python -m tools.deployment.transcripts` typed what the guides say. What you see is what came back. `(N s)` is how long a command took.
Lines that begin with `#` say what the program waited for. `~` is the folder in which everything lies.
`[...]` stands for lines that are left out.

All parts ran on one machine with 2 cores, under TLS. With a load above 2, the seconds are those of a busy machine.

| task | seconds | load |
|---|---:|---:|
"""
TOOK = re.compile(r"^It took (\d+) s on .* with a load of (\d+)\.$", re.M)


def sections_of(page: Path) -> dict[str, str]:
    """Return the sections of a page that an earlier run of this program wrote: title -> text; empty: there is no page."""
    parts = re.split(r"(?m)^## ", page.read_text()) if page.exists() else [""]
    return {title: text.strip() + "\n" for title, _, text in (part.partition("\n") for part in parts[1:])}


def page_of(sections: Mapping[str, str]) -> str:
    rows, texts = "", ""
    for title, _ in TASKS.values():
        if title in sections:
            took = TOOK.search(sections[title])
            rows += f"| {title} | {took[1] if took else '?'} | {took[2] if took else '?'} |\n"
            texts += f"\n## {title}\n\n{sections[title]}"
    missing = [title for title, _ in TASKS.values() if title not in sections]
    return HEAD + rows + (f"\nNot typed yet: {'; '.join(missing)}.\n" if missing else "") + texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/how-to/transcripts.md", help="it keeps the sections of other tasks")
    parser.add_argument("--only", default=",".join(TASKS), help="tasks, separated by commas; without create: in the federation of --folder")
    parser.add_argument("--folder", type=Path, help="the folder of all files; default: a temporary folder")
    given = parser.parse_args()
    sections = sections_of(given.page)
    with tempfile.TemporaryDirectory(prefix="fl-bn-transcripts-") as made:
        folder = (given.folder or Path(made)).absolute()
        t = Terminal(folder)
        if not (folder / "origin").exists():
            subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "origin")], check=True)
            subprocess.run(["git", "-C", str(folder / "origin"), "tag", "-f", "v0.1.0"], check=True, stdout=subprocess.DEVNULL)
        commit = subprocess.run(
            ["git", "-C", str(folder / "origin"), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        for copy in ("server-copy", "sites-copy"):
            install(folder / copy, folder / "origin", "v0.1.0")
        try:
            chosen = given.only.split(",")
            if "create" not in chosen:
                again(t)
            for name in chosen:
                title, task = TASKS[name]
                print(f"{datetime.now():%H:%M:%S} {title}", flush=True)
                begin = time.monotonic()
                task(t)
                when = f"{datetime.now():%d %B %Y}, at commit {commit.stdout.strip()}, with a load of {os.getloadavg()[0]:.0f}"
                sections[title] = f"{t.taken()}\nIt took {time.monotonic() - begin:.0f} s on {when}.\n"
                given.page.write_text(page_of(sections))
        except BaseException:
            print("\n".join(t.lines), file=sys.stderr)
            raise
        finally:
            for process in t.started.values():
                process.terminate()
            for process in t.started.values():
                process.wait(60)


if __name__ == "__main__":
    main()
