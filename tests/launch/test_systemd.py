"""The two units of deploy/, under a systemd that has booted: in a container whose root is this machine's own
with a layer over it. What happens inside is the shell script below; what it says is judged here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# $1: where this repository is. Lines of /result/said: NAME VALUE.
INSIDE = r"""
set -eu
token=/etc/everstep/admin.token
say() { echo "$@" >> /result/said; }
until_true() {
    for _ in $(seq 200); do if eval "$1"; then return 0; fi; sleep 0.2; done
    say waited-for "$1"; exit 1
}
everstep() { /opt/everstep/bin/everstep "$@"; }
ask() { everstep "$@" --address https://head:7077 --tls /etc/everstep/tls --token @$token; }
is_joined() { ask status --json 2>/tmp/why | grep -q '"head"'; }
pid() { systemctl show -p MainPID --value everstep-$1; }
steps() { wc -l < /tmp/trained/steps; }
moves() { was=$(steps); until_true '[ $(steps) -gt $was ]'; }

cd /etc/everstep
everstep ca init && everstep ca issue coordinator --host head && everstep ca issue node head
mv everstep-ca/issued/coordinator tls && mv everstep-ca/issued/head agent-tls
chown -R everstep: tls agent-tls
head -c 24 /dev/urandom | base64 | tr -d '/+=' > admin.token && chmod 600 admin.token
systemctl start everstep-coordinator
until_true 'ask status --json > /tmp/status 2>/tmp/why'
su everstep -s /bin/sh -c "/opt/everstep/bin/everstep access add node head -o /tmp/agent.token \
    --file /var/lib/everstep/credentials"
mv /tmp/agent.token . && chown root: agent.token && chmod 600 agent.token
systemctl start everstep-agent
until_true is_joined
say joined yes

mkdir -m 777 /tmp/trained && cd /tmp/trained
cp /result/train.py .
ask submit --script train.py --name trial
until_true '[ -s steps ] && [ -s pid ]'
rank=$(cat pid)
for what in SIGKILL SIGUSR2; do
    was_pid=$(pid agent)
    systemctl kill -s $what --kill-whom=main everstep-agent
    until_true '[ "$(pid agent)" -gt 0 ] && [ "$(pid agent)" != "$was_pid" ]'
    until_true is_joined
    moves
    say agent-$what "$(kill -0 $rank && echo same-rank || echo other-rank)"
done
was_pid=$(pid coordinator)
systemctl kill -s SIGKILL everstep-coordinator
until_true '[ "$(pid coordinator)" -gt 0 ] && [ "$(pid coordinator)" != "$was_pid" ]'
until_true 'ask status --json 2>/dev/null | grep -q trial'
moves
say coordinator-SIGKILL "$(kill -0 $rank && echo same-rank || echo other-rank)"
systemctl stop everstep-agent
lives=$(kill -0 $rank 2>/dev/null && echo rank-lives || echo rank-ended)
say agent-stop "$lives $(systemctl is-failed everstep-agent || true)"
systemctl stop everstep-coordinator
say coordinator-stop "$(systemctl is-failed everstep-coordinator || true)"
say finished yes
"""

TRAIN = """
import os, time
open("pid", "w").write(str(os.getpid()))
while True:
    open("steps", "a").write("x\\n")
    time.sleep(0.1)
"""

UNIT = """
[Unit]
Description=Trial
[Service]
Type=oneshot
ExecStart=/bin/bash /result/inside.sh
ExecStopPost=/bin/sh -c 'journalctl --no-pager -u everstep-agent -u everstep-coordinator > /result/journal'
ExecStopPost=systemctl --force --force poweroff
StandardOutput=file:/result/log
StandardError=inherit
"""

BOOT = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1/layer" && mkdir "$1/layer/up" "$1/layer/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/layer/up,workdir=$1/layer/work" "$1/root"
R=$1/root
rm -rf "$R"/etc/systemd/system/*.wants
for unit in systemd-udevd systemd-logind console-getty systemd-networkd systemd-resolved; do
    ln -sf /dev/null "$R/etc/systemd/system/$unit.service"
done
mkdir -p "$R/opt/everstep/bin" "$R/etc/everstep" "$R/result" "$R/etc/systemd/system/everstep-agent.service.d"
command=$R/opt/everstep/bin/everstep
printf '#!/bin/sh\nexec env PYTHONPATH="%s" "%s" -m everstep.cli.main "$@"\n' "$2/src" "$3" > "$command"
chmod 755 "$command"
cp "$2"/deploy/everstep-*.service "$R/etc/systemd/system/"
# Two machines share one here: what is in /etc/everstep/tls of the agent's is bound for its unit alone.
printf '[Service]\nBindReadOnlyPaths=/etc/everstep/agent-tls:/etc/everstep/tls\n' \
    > "$R/etc/systemd/system/everstep-agent.service.d/place.conf"
cp "$1/trial.service" "$R/etc/systemd/system/trial.service"
echo 127.0.0.1 localhost head > "$R/etc/hosts"; echo head > "$R/etc/hostname"
chroot "$R" useradd --system everstep
path=$3; while [ "$path" != / ]; do path=$(dirname "$path"); chmod o+x "$R$path"; done
path=$(readlink -f "$3"); while [ "$path" != / ]; do path=$(dirname "$path"); chmod o+x "$R$path"; done
exec systemd-nspawn --quiet --directory="$R" --register=no --keep-unit --private-network --hostname=head \
    --bind="$1/result:/result" --boot systemd.unit=trial.service
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(shutil.which("systemd-nspawn") is None, reason="needs systemd-nspawn (systemd-container)")
def test_the_units_start_their_services_again_and_ranks_outlive_their_agent(tmp_path: Path) -> None:
    for name in ("layer", "root", "result"):
        (tmp_path / name).mkdir()
    (tmp_path / "result/inside.sh").write_text(INSIDE)
    (tmp_path / "result/train.py").write_text(TRAIN)
    (tmp_path / "trial.service").write_text(UNIT)
    (tmp_path / "boot.sh").write_text(BOOT)
    command = ["unshare", "--mount", "bash", str(tmp_path / "boot.sh"), str(tmp_path), str(ROOT)]
    with (tmp_path / "console").open("wb") as console:
        subprocess.run([*command, sys.executable], stdout=console, stderr=console, timeout=280)
    said = tmp_path / "result/said"
    paths = [tmp_path / "result/log", tmp_path / "result/journal", tmp_path / "console"]
    logs = [log.read_text(errors="replace") for log in paths if log.exists()]
    shown = "\n".join(text[-4000:] for text in logs)
    assert said.exists(), shown
    assert dict(line.split(" ", 1) for line in said.read_text().splitlines()) == {
        "joined": "yes",
        "agent-SIGKILL": "same-rank",
        "agent-SIGUSR2": "same-rank",
        "coordinator-SIGKILL": "same-rank",
        "agent-stop": "rank-ended inactive",
        "coordinator-stop": "inactive",
        "finished": "yes",
    }, shown
