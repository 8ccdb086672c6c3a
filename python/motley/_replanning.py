"""Going on by another plan when a device turns out to be slower than planned: Elastic(replan="auto").

Before a step, where no gradients wait to be used: rank 0 plans for the cluster with that device as slow as it is. If what that saves,
over as many steps as were made so far, is more than planning and moving the state take, all go on by it.
"""

import json
import sys
import time

import torch

from ._agree import captured, followed_plan, replanner, send_text
from ._agreement import same_batch
from ._errors import UserError

_LEAST = 0.03  # of a step that has to be saved
_TOLD = 5  # steps between two exchanges of SlowDeviceWatch


class Replanning:
    """Of one model. `slow`: [(device of the cluster that is left, factor)] that were named and not followed yet."""

    def __init__(self, dist):
        self.dist, self.slow, self.steps = dist, [], 0

    def note(self, found):
        """Behind a step: what this worker was told; idle workers are told here. Collective in every fifth step."""
        dist, plan = self.dist, self.dist._run.plan
        self.steps += 1
        if self.steps % _TOLD == 0 and len(plan.devices) < dist._group.size:
            said = torch.zeros(2 * dist._group.size, dtype=torch.float64)
            if dist._group.rank == plan.devices[0]:
                for device, factor, _ in found:
                    said[2 * device], said[2 * device + 1] = 1, factor
            dist._group.native.tell(said)
            found = [(device, float(said[2 * device + 1]), False) for device in range(dist._group.size) if said[2 * device] > 0]
        self.slow += [(plan.devices[device], factor) for device, factor, _ in found]

    def follow(self):
        """Before a step: another plan, where devices were named and it is worth it; collective where they were."""
        dist = self.dist
        if not self.slow or any(piece.grad is not None for piece in dist._pieces):
            return
        launch, run = dist._group.launch, dist._run
        now = launch.cluster
        for device, factor in self.slow:
            now = now.slower(device, factor)
        self.slow = []
        began, made, said = time.monotonic(), None, {"go": False}
        if dist._group.rank == 0:
            old = run.plan._native.step_on(now.part(run.plan.devices))
            try:
                made = launch.search_again(captured(run.step)[0], now)
                moved = sum(slot.tensor.numel() * slot.tensor.element_size() for slot in run.step.parameters) * 3
                cost = time.monotonic() - began + moved / now.slowest_link()
                new = made.predicted_step_s
                said = {"go": new < (1 - _LEAST) * old and (old - new) * dist._steps > cost, "old": old, "new": new}
            except UserError:
                pass
        said = json.loads(send_text(dist._group, json.dumps(said)))
        launch.cluster = now
        if not said["go"]:
            return
        same_batch(dist._group.peers, dist._held)
        dist._runs.replan = replanner(now, run.plan, {key: value for key, value in launch.options.items() if key != "optimizer"})
        agreed = followed_plan(run.step, dist._group, [], lambda _: made)
        other = dist._runs.make_run(run.step, agreed)
        dist._runs.known.clear()
        dist._runs.add(other)
        dist._switch(other)
        if dist._group.rank == 0:
            print(f"motley: [elastic] step {dist._steps}: goes on by a plan for the speed that devices have now, {said['new'] * 1e3:.1f} ms a step "
                  f"instead of {said['old'] * 1e3:.1f}", file=sys.stderr, flush=True)  # fmt: skip
