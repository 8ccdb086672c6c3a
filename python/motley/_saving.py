"""The state of a distributed model in the layout of the plain one: whole tensors, under the model's own names."""

import collections

import torch

from . import _formats, _gradients, _torch
from ._agree import send_text
from ._agreement import same_batch
from ._errors import UserError
from ._mirror import current, inside
from ._pieces import plain
from ._step import prefix_of_loss


class Saving:
    """The part of Distributed that puts its state together, takes it apart, and reads and writes it."""

    def _rank_0(self, tensor):
        """Rank 0's tensor on every rank, in memory of its own."""
        mine = tensor.detach().to(self._group.device, copy=True).contiguous()
        if self._group.size > 1 and mine.numel() > 0:
            if self._group.rank != 0:
                mine.zero_()
            self._group.all_reduce(mine)
        return mine

    def _own(self, kind, name, whole):
        """This worker's piece, in memory of its own; empty if it has none."""
        if not self._worker.holds(kind, name):
            return torch.empty(0, dtype=whole.dtype, device=self._group.device)
        return self._worker.piece(kind, name, whole).to(self._group.device, copy=True).contiguous()

    def _slots(self):
        """{name: slot} of parameters and buffers."""
        return {slot.name: slot for slot in self._step_spec.parameters + self._step_spec.buffers}

    def _whole_tensors(self):
        """{name: tensor} of parameters and buffers, from whoever holds them; they may be this worker's own."""
        step = self._step_spec
        return self._group.peers.all_of(self._held, step.parameters, step.buffers)

    def _held_by_nobody(self, step):
        """{name: whole tensor} of what no stage of a pipeline reads; it does not change."""
        slots = [("parameter", slot) for slot in step.parameters] + [("buffer", slot) for slot in step.buffers]
        holders = torch.tensor([self._worker.holds(kind, slot.name) for kind, slot in slots], dtype=torch.int32)
        holders = holders.to(self._group.device)
        self._group.all_reduce(holders)
        nobody = [slot for (_, slot), count in zip(slots, holders.tolist()) if count == 0]
        return {slot.name: self._rank_0(slot.tensor) for slot in nobody}

    def _loss_has_state(self):
        """Whether the loss is a module that training changes; constant class weights, say, are no part of the state."""
        loss_fn = self._step_spec.loss_fn
        if not isinstance(loss_fn, torch.nn.Module):
            return False
        own = prefix_of_loss(self.module) + "."
        return any(True for _ in loss_fn.parameters()) or any(name.startswith(own) for name in self.plan.graph().updated_buffers)

    @inside
    def _names(self):
        """[(key of the model's state_dict, name of its slot)]; tied parameters have several keys."""
        slots = self._step_spec.parameters + self._step_spec.buffers
        name_of = {id(slot.held): slot.name for slot in slots}
        held = self.module.state_dict(keep_vars=True)
        if self._loss_has_state():
            self._step_spec.loss_fn.state_dict(destination=held, prefix=prefix_of_loss(self.module) + ".", keep_vars=True)
        return [(key, name_of.get(id(value))) for key, value in held.items()], held

    @inside
    def state_dict(self):
        """Parameters and buffers, whole, under the model's own names and on the CPU.

        Any worker may call it alone: the others answer whatever they do, after the same step.
        """
        same_batch(self._group.peers, self._held)
        whole = self._whole_tensors()
        names, held = self._names()
        slots = self._slots()
        state, copies = collections.OrderedDict(), {}  # tied parameters are one tensor, as in plain PyTorch
        for key, name in names:
            if name is not None and name not in copies:
                copies[name] = slots[name].shown(whole[name].detach().cpu()).clone()
            state[key] = held[key] if name is None else copies[name]
        return state

    def load_state_dict(self, state, strict=True):
        """Takes a state_dict of the model; every worker passes the same."""
        state = {key: current(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        names, _ = self._names()
        missing = [key for key, name in names if name is not None and key not in state]
        unexpected = [key for key in state if key not in dict(names)]
        if strict and (missing or unexpected):
            raise UserError(
                f"[distribute] the state does not fit the model: missing {', '.join(missing) or 'nothing'}, unexpected "
                f"{', '.join(unexpected) or 'nothing'}; or load with strict=False"
            )
        slots = self._slots()
        for key, name in names:
            if name is not None and key in state and state[key].shape != slots[name].held.shape:
                raise UserError(
                    f"[distribute] {key} is {list(state[key].shape)}; the model's is {list(slots[name].held.shape)}"
                )
        self._set_whole({name: slots[name].state_of(state[key]) for key, name in names if name is not None and key in state})

    def _set_whole(self, tensors):
        """Takes {name of a slot: whole tensor}; every worker passes the same."""
        slots = self._slots()
        parameters = {slot.name for slot in self._step_spec.parameters}
        with torch.no_grad(), self._group.peers.change(self._held):
            for name, tensor in tensors.items():
                value = tensor.detach().to(slots[name].tensor.dtype)
                kind = "parameter" if name in parameters else "buffer"
                if not self._worker.holds(kind, name):
                    if name in self._held.nobodys:
                        self._held.nobodys[name].copy_(value)
                elif kind == "parameter":
                    plain(self._held.pieces[name]).copy_(self._own(kind, name, value))
                else:
                    self._worker.set(kind, name, self._own(kind, name, value))
            self._worker.publish()
            self._held.mark = self._held.versions()

    def _optimized(self):
        """The slots of the optimizer's parameters, in its order."""
        mine = self._pieces if self._wholes is None else [self._wholes.parameters.get(i) for i in range(len(self._pieces))]
        slot_of = {id(tensor): slot for slot, tensor in zip(self._step_spec.parameters, mine) if tensor is not None}
        return [slot_of[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    @inside
    def optimizer_state_dict(self):
        """The optimizer's state for whole parameters, as the same optimizer on the plain model has it; of any worker alone."""
        same_batch(self._group.peers, self._held)
        state = type(self.optimizer).state_dict(self.optimizer)
        if self._wholes is not None:
            return _gradients.copied(state)
        wanted = [("state", slot.name, slot.tensor.shape) for slot in self._optimized()]
        found = self._group.peers.whole(self._held, wanted)
        state["state"] = {}
        for index, (_, name, _) in enumerate(wanted):
            if found.get(("state", name)):
                state["state"][index] = {
                    key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for key, value in found["state", name].items()
                }
        return state

    @inside
    def load_optimizer_state_dict(self, state):
        """Takes the state of the same optimizer on the plain model; every worker passes the same."""
        load = type(self.optimizer).load_state_dict
        if self._wholes is not None:
            with self._group.peers.change(self._held):
                load(self.optimizer, _gradients.copied(state))
            return
        slots = self._optimized()
        local = {"param_groups": state["param_groups"], "state": {}}
        for index, values in state["state"].items():
            if index >= len(slots):
                raise UserError(f"[distribute] the optimizer's state has parameter {index}; the model has {len(slots)}")
            slot = slots[index]
            if not self._worker.holds("parameter", slot.name):
                continue
            local["state"][index] = {
                key: self._own("parameter", slot.name, value)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.tensor.shape
                else value.clone()  # torch 2 would go on counting steps in the other optimizer's tensor
                if isinstance(value, torch.Tensor)
                else value
                for key, value in values.items()
            }
        with self._group.peers.change(self._held), _torch.without_subclasses():
            load(self.optimizer, local)

    def _optimizer_values(self):
        """[(name of a parameter, its part here or None for all of it, {key: value})] of the optimizer's state on this worker."""
        rows = []
        for i, slot in enumerate(self._step_spec.parameters):
            if self._wholes is not None:
                tensor, part = self._wholes.parameters.get(i), None
            else:
                tensor, part = self._held.pieces.get(slot.name), self._held.parts["parameter"].get(slot.name)
            if tensor is not None and self.optimizer.state.get(tensor):
                rows.append((slot.name, part, self.optimizer.state[tensor]))
        return rows

    def _piece_of_state(self, name, whole):
        """What this worker has of an optimizer's tensor that is as a parameter; None: nothing."""
        if self._wholes is not None:
            return whole
        return self._own("parameter", name, whole) if self._worker.holds("parameter", name) else None

    def _set_optimizer(self, values, groups):
        """Takes {name of a parameter: {key: value}}, as this worker has them, and what the groups say beside their parameters."""
        slots, now = self._optimized(), self.optimizer.param_groups
        if len(groups) != len(now):
            raise UserError(f"[elastic] the optimizer has {len(now)} groups of parameters, in what was left are {len(groups)}; give it the same")
        at, state = 0, {"state": {}, "param_groups": []}
        for index, slot in enumerate(slots):
            if slot.name in values and (self._wholes is not None or self._worker.holds("parameter", slot.name)):
                state["state"][index] = values[slot.name]
        for group, said in zip(now, groups):
            state["param_groups"].append({**said, "params": list(range(at, at + len(group["params"])))})
            at += len(group["params"])
        with self._group.peers.change(self._held), _torch.without_subclasses():
            type(self.optimizer).load_state_dict(self.optimizer, state)

    def _sum(self, tensor):
        """The sum of the workers' tensors, on all of them and on the CPU; bytes where it holds truth values."""
        given = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        given = given.to(self._group.device)
        if self._group.size > 1 and given.numel() > 0:
            self._group.all_reduce(given)
        return given.to("cpu", tensor.dtype)

    def save(self, path, format=None):
        """Writes {model, optimizer, steps} in the original layout. Collective; rank 0 writes.

        format   'torch', which torch.load reads; 'safetensors', the model alone, also by a name that ends so; 'dcp', a folder that
                 torch.distributed.checkpoint reads
        """
        kind, problem = _formats.format_of(path, format), ""
        _formats.needs(kind)
        if self._group.rank == 0:
            try:
                file = {"model": self.state_dict(), "steps": self._steps}
                if self.optimizer is not None and kind != "safetensors":
                    file["optimizer"] = self.optimizer_state_dict()
                    if kind == "dcp":
                        file["optimizer"] = _formats.by_name(file["optimizer"], self._optimized_names())
                _formats.write(path, file, kind)
            except UserError as error:
                problem = str(error)
            except (OSError, RuntimeError) as error:
                problem = f"[distribute] {path} cannot be written: {str(error).splitlines()[0]}; give a file in a folder that exists"
        problem = send_text(self._group, problem)
        if problem:
            raise UserError(problem)

    @inside
    def _optimized_names(self):
        return [slot.name for slot in self._optimized()]

    def load(self, path, format=None):
        """Goes on from a file that save() wrote, on this or another cluster, or from a model's file in one of its formats; every worker reads it."""
        kind = _formats.format_of(path, format)
        _formats.needs(kind)
        try:
            file = _formats.read(path, kind)
            steps, state = int(file.get("steps", 0) if kind != "torch" else file["steps"]), file["model"]
        except OSError as error:
            raise UserError(f"[distribute] {path} cannot be read: {error.strerror or error}; give a file that save() wrote") from None
        except Exception:
            raise UserError(f"[distribute] {path} is damaged or not a file that save() wrote") from None
        self.load_state_dict(self._with_tied(state))
        if self.optimizer is not None and kind != "safetensors":
            if "optimizer" not in file:
                raise UserError(f"[distribute] {path} holds no optimizer; use load_state_dict(torch.load(path)['model'])")
            self.load_optimizer_state_dict(_formats.by_index(file["optimizer"], self._optimized_names()))
        self._steps = steps

    def _with_tied(self, state):
        """A state in which a tied parameter is under all of its names; files of safetensors have it under one."""
        names, _ = self._names()
        known = {name: state[key] for key, name in names if name is not None and key in state}
        return {**{key: known[name] for key, name in names if name in known}, **state}
