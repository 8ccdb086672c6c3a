"""distribute(elastic=) under torchrun on machines whose network is cut: those that still see one another go on, with the losses of plain training.

Each machine is a network namespace of its own, with a launcher in it; cables are pulled (ip link set down) and put back.
"""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

import support
import test_elastic
from motley import _torch

NET = "10.77.0"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside():
    """This program again in a network namespace of its own; nothing where that is not allowed."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid() != 0:
        words += ["--user", "--map-root-user"]
    if not shutil.which("unshare") or not shutil.which("ip") or subprocess.run([*words, "ip", "link", "set", "lo", "up"], capture_output=True).returncode != 0:
        return
    os.environ["MOTLEY_INSIDE"] = "1"
    os.execvp("unshare", [*words, sys.executable, *sys.argv])


@unittest.skipIf(os.environ.get("MOTLEY_INSIDE") != "1", "no network namespaces can be made here")
@unittest.skipIf(_torch.VERSION < (2, 0), "torchrun of 1.13 takes no address of the machine that it is on")
class Partitions(test_elastic.Case):
    def setUp(self):
        super().setUp()
        self.said.update(steps=40, seconds=0.1, hang=2)
        self.places = []
        ip("link", "set", "lo", "up")
        ip("link", "add", "hub", "type", "bridge")
        ip("addr", "add", f"{NET}.254/24", "dev", "hub")
        ip("link", "set", "hub", "up")

    def tearDown(self):
        super().tearDown()
        for place in self.places:
            place.kill()
            place.wait()
        ip("link", "del", "hub")

    def machine(self, workers=1):
        """A launcher on a machine of its own."""
        number = len(self.places) + 1
        place = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
        self.places.append(place)
        while os.readlink(f"/proc/{place.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        ip("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", str(place.pid))
        ip("link", "set", f"port{number}", "master", "hub", "up")
        within = ["nsenter", f"--net=/proc/{place.pid}/ns/net"]
        for words in (["addr", "add", f"{NET}.{number}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
            subprocess.run([*within, "ip", *words], check=True)
        command = [*within, sys.executable, "-m", "motley.launch", "--nnodes", "1:3", "--nproc_per_node", str(workers), "--max_restarts", "4",
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{NET}.1:29411", "--rdzv_id", "test", "--local_addr", f"{NET}.{number}",
                   "--rdzv_conf", f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={number == 1}",
                   "--monitor_interval", "0.2", test_elastic.WORKER, json.dumps(self.said)]  # fmt: skip
        with open(os.path.join(self.folder, f"log-{len(self.launchers)}"), "w") as log:
            environment = {**support.environment(), "GLOO_SOCKET_IFNAME": "eth0"}
            self.launchers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return self.launchers[-1]

    def cable(self, number, state):
        ip("link", "set", f"port{number}", state)

    def end(self, launcher):
        """A machine that is switched off, and its memory with it."""
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        for folder in glob.glob(f"/dev/shm/motley-elastic-{os.getuid()}-{launcher.pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def test_a_machine_is_cut_off(self):
        first, second, third = self.machine(), self.machine(), self.machine()
        self.wait_for(self.reached(3, 3))
        self.cable(2, "down")
        cut = time.time()
        self.wait_for(lambda: any(size == 2 and at > cut for _, _, size, at in self.losses()))
        took = min(at for _, _, size, at in self.losses() if size == 2 and at > cut) - cut
        print(f"a step on the two that see one another {took:.1f} s after the cable was pulled", file=sys.stderr)
        self.end(second)
        self.finish([first, third])
        self.assertIn("without device", self.log())

    def test_a_cable_that_is_put_back(self):
        """Shorter than anybody notices: nobody is lost, and the same steps go on."""
        first, second, third = self.machine(), self.machine(), self.machine()
        self.wait_for(self.reached(3, 3))
        self.cable(3, "down")
        time.sleep(0.4)
        self.cable(3, "up")
        self.finish([first, second, third])
        self.assertEqual(self.lost_steps(), 0, self.log())


if __name__ == "__main__":
    if os.environ.get("MOTLEY_INSIDE") != "1":
        inside()
    unittest.main()
