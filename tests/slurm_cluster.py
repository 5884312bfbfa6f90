"""A SLURM cluster of two nodes on this machine, from the distribution's packages: munged, slurmctld and two slurmd.

python tests/slurm_cluster.py     starts it, prints the variables to export, and ends it at Ctrl-C
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATIENCE = 60
CONFIG = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
SlurmdTimeout=20
KillWait=5
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 RealMemory=1000 Gres=gpu:{gpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4 RealMemory=1000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
GPUS = 2  # of each node. SLURM counts device files; here they are copies of /dev/null.
GRES = "AutoDetect=off\nNodeName=node[1-2] Name=gpu File={folder}/gpu[0-{last}]\n"


def missing() -> str:
    """Why SLURM cannot run here; empty if it can."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"needs SLURM: {', '.join(absent)} not found (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "needs to be root, to start SLURM's daemons"


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start the daemons, and end them with the context. Yields the variables with which a command finds them."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))  # the path of a socket must be short
    ports = _free_ports(3)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(), folder=folder, port=ports[0], port1=ports[1], port2=ports[2], gpus=GPUS
        )
    )
    (folder / "gres.conf").write_text(GRES.format(folder=folder, last=GPUS - 1))
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # the numbers of /dev/null
    (folder / "state").mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {"SLURM_CONF": str(config)}
    munged = [*("munged", "--foreground", "--force", "--socket", f"{folder}/munge.socket", "--key-file", str(key))]
    munged += [*("--pid-file", f"{folder}/munged.pid", "--log-file", f"{folder}/munged.log")]
    munged += ["--seed-file", f"{folder}/munged.seed"]
    daemons = []
    try:
        daemons.append(_daemon(folder, munged, environment))
        _wait_for(lambda: (folder / "munge.socket").exists(), folder)
        daemons.append(_daemon(folder, ["slurmctld", "-D", "-c"], environment))
        daemons += [_daemon(folder, ["slurmd", "-D", "-N", f"node{n}"], environment) for n in (1, 2)]
        sinfo = ["sinfo", "--noheader", "--Node", "--partition", "main", "--format", "%t"]
        everyone = {**os.environ, **environment}

        def idle() -> bool:
            shown = subprocess.run(sinfo, env=everyone, capture_output=True, text=True, check=False)
            return shown.stdout.split() == ["idle", "idle"]

        _wait_for(idle, folder)
        yield environment
    finally:
        scancel = ["scancel", "--partition", "main"]
        subprocess.run(scancel, env={**os.environ, **environment}, capture_output=True, timeout=20)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _daemon(folder: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / "daemons.log").open("ab") as log:
        return subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + PATIENCE, (folder / "daemons.log").read_text()[-3000:]
        time.sleep(0.2)


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    with cluster() as variables:
        for name, value in variables.items():
            print(f"export {name}={value}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            signal.pause()
