"""State kept twice: distribute(elastic=..., redundancy=1).

Each worker keeps what one other holds alone: the pieces of parameters that are cut, with their optimizer state. They are not sent in
every step. Before the optimizer's step a worker sends the gradients of its pieces to where they are kept too, and a second optimizer
of the same kind makes the same step there (src/runtime/second_copies.h). So what is kept is that of the last finished step, and what a
lost worker had not sent yet belongs to a step that nobody finished.

What changes a piece outside of the optimizer's step (a script that clamps parameters, load()) is not followed at once: until the next
step of the optimizer, which sends all of it, the copy counts as none, and a loss in between goes on from the last checkpoint.
"""

import collections
import zlib

import torch

from . import _motley, _optim
from ._errors import UserError
from ._pieces import plain
from ._state import changes_of

_ALIGNED = 16  # bytes, at which tensors begin in a message


def check(optimizer, by_element):
    """UserError where its step cannot be made for pieces of another worker."""
    name = type(optimizer).__name__
    if not by_element or type(optimizer) not in _optim.KNOWN:
        raise UserError(
            f"[distribute] redundancy is 1, which follows optimizers of torch.optim that treat every element by itself, not {name}; give "
            "one of those, or redundancy=0"
        )


def _packed(tensors, header=()):
    """One tensor of bytes."""
    parts = [torch.tensor(header, dtype=torch.int64)] if header else []
    parts += [plain(tensor).contiguous().reshape(-1) for tensor in tensors]
    out = torch.zeros(_size([(part.dtype, part.numel()) for part in parts]), dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")
    for part, (begin, end) in zip(parts, _places([(part.dtype, part.numel()) for part in parts])):
        if end > begin:
            out[begin:end].view(part.dtype).copy_(part)
    return out


def _bytes(dtype, count):
    return torch.empty((), dtype=dtype).element_size() * count


def _places(kinds):
    """[(begin, end)] of tensors of (type, elements) in a message."""
    places, at = [], 0
    for dtype, count in kinds:
        places.append((at, at + _bytes(dtype, count)))
        at += -(-_bytes(dtype, count) // _ALIGNED) * _ALIGNED
    return places


def _size(kinds):
    return sum(-(-_bytes(dtype, count) // _ALIGNED) * _ALIGNED for dtype, count in kinds)


def _unpacked(message, kinds):
    return [
        message[begin:end].view(dtype) if end > begin else torch.empty(0, dtype=dtype, device=message.device)
        for (dtype, _), (begin, end) in zip(kinds, _places(kinds))
    ]


class SecondCopies:
    """Of one model, on one worker of its plan. Making one sends the whole state; collective among them."""

    def __init__(self, dist):
        self.dist, self.worker = dist, dist._worker
        self.parts = {kind: {} for kind in ("parameter", "buffer")}  # {name: part of the whole that is kept here}
        for kind, name, part in self.worker.kept_second():
            self.parts[kind][name] = part
        self.pieces = {}  # {name: kept piece}
        for name, part in self.parts["parameter"].items():
            own = dist._held.pieces[name]
            self.pieces[name] = torch.zeros(part[7], dtype=own.dtype, device=own.device)
        self.buffers, self.coming, self.optimizer = {}, {}, None
        self.mark, self.ready = None, False  # the own state when both were equal; whether all of a step has come
        self._trade(self._gradients())
        self._take_buffers()
        self.mark = self._now()

    def receive(self):
        """Before the optimizer's step, when gradients are there. Collective."""
        optimizer = self.dist.optimizer
        hooks = [len(getattr(optimizer, f"_optimizer_step_{when}_hooks", ())) for when in ("pre", "post")]
        if any(hooks):
            raise UserError("[distribute] redundancy=1 does not follow hooks of the optimizer's step; leave them out, or give redundancy=0")
        _motley.fault_point("second")
        self.ready = False
        self._trade(self._gradients())
        self.ready = True
        _motley.fault_point("second")

    def step(self):
        """With the optimizer's step."""
        if not self.ready:  # it has not come: what is kept is that of the step before
            self.mark = None
            return
        for group, kept in zip(self.dist.optimizer.param_groups, self.optimizer.param_groups):
            kept.update({key: value for key, value in group.items() if key != "params"})
        type(self.dist.optimizer).step(self.optimizer)
        for piece in self.pieces.values():
            piece.grad = None
        self._take_buffers()
        self.ready, self.mark = False, self._now()

    def rows(self):
        """[(kind, name, part, tensor)] of what is kept and equals what the other worker had, as Keeper._state lists it."""
        if not self._unchanged():
            return []
        rows = [("", name, self.parts["parameter"][name], piece) for name, piece in self.pieces.items()]
        rows += [("", name, self.parts["buffer"][name], tensor) for name, tensor in self.buffers.items()]
        for name, piece in self.pieces.items():
            for key, value in self.optimizer.state.get(piece, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    rows.append(("state " + key, name, self.parts["parameter"][name], value))
        return rows

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def _own_state(self, name):
        """[(key, tensor)] of what the optimizer has of every element of an own piece."""
        state = self.dist.optimizer.state.get(self.dist._held.pieces[name], {})
        return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]

    def _now(self):
        """What tells whether own pieces and their state were changed, in place or by others: the tensors themselves, and counts."""
        tensors, counts = [], []
        for name in self.pieces:
            piece = self.dist._held.pieces[name]
            tensors += [piece] + [value for _, value in self._own_state(name)]
            counts.append(changes_of(piece))
        return tensors, counts + [plain(tensor)._version for tensor in tensors]

    def _unchanged(self):
        if self.mark is None:
            return False
        tensors, counts = self._now()
        return len(tensors) == len(self.mark[0]) and all(a is b for a, b in zip(tensors, self.mark[0])) and counts == self.mark[1]

    def _gradients(self):
        return {name: self.dist._held.pieces[name].grad for name in self.pieces}

    def _trade(self, gradients):
        """Gradients and buffers go and come; before them, where the own state was changed, all of it. Collective."""
        held, published = self.dist._held, self.worker.published
        whole = not self._unchanged()
        there = [name for name in self.pieces if gradients[name] is not None]
        states = {name: self._own_state(name) for name in self.pieces}
        names = [(name, name in there, [key for key, _ in states[name]]) for name in self.pieces]
        device = next(iter(held.pieces.values())).device
        head = [(torch.int64, 2)]
        header = self._exchanged(torch.tensor([int(whole), zlib.crc32(repr(names).encode())]), head, device)[0].tolist()
        if header[1] != zlib.crc32(repr(names).encode()):
            raise UserError("[distribute] redundancy=1: two workers have gradients or optimizer state of different parameters; give redundancy=0")
        going, kinds = [], []
        for name, part in self.parts["parameter"].items():
            piece = held.pieces[name]
            kinds.append([(piece.dtype, part[7])] * (1 + len(states[name])))
            going.append([piece] + [value for _, value in states[name]])
        if whole or header[0]:
            mine = [tensor for tensors in going for tensor in tensors] if whole else []
            flat = [kind for of_piece in kinds for kind in of_piece] if header[0] else []
            came = iter(self._exchanged(mine, flat, device))
            if header[0]:
                self._take({name: [next(came).clone() for _ in of_piece] for name, of_piece in zip(self.pieces, kinds)}, states)
        if self.optimizer is None:
            raise UserError("[distribute] redundancy=1: the second copy of a worker's state did not come; start again")
        mine = [gradients[name] for name in there] + [published(name) for name in self.parts["buffer"]]
        kinds = [(self.pieces[name].dtype, self.pieces[name].numel()) for name in there]
        kinds += [(published(name).dtype, part[7]) for name, part in self.parts["buffer"].items()]
        came = self._exchanged(mine, kinds, device)
        for name, gradient in zip(there, came):
            self.pieces[name].grad = gradient
        self.coming = {name: tensor.clone() for name, tensor in zip(self.parts["buffer"], came[len(there):])}

    def _exchanged(self, mine, kinds, device):
        mine = _packed([mine] if isinstance(mine, torch.Tensor) else mine).to(device)
        theirs = torch.empty(_size(kinds), dtype=torch.uint8, device=device)
        with self.dist._group.peers.collective():
            self.worker.exchange_second(mine, theirs)
        return _unpacked(theirs, kinds)

    def _take(self, came, states):
        """All of what the other worker holds alone."""
        own = self.dist.optimizer
        if self.optimizer is None:
            self.optimizer = object.__new__(type(own))
            left_out = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "state", "param_groups")
            self.optimizer.__dict__.update({key: value for key, value in vars(own).items() if key not in left_out})
        name_of = {id(piece): name for name, piece in self.dist._held.pieces.items()}
        self.optimizer.state = collections.defaultdict(dict)
        self.optimizer.param_groups = [
            {**group, "params": [self.pieces[name_of[id(p)]] for p in group["params"] if name_of.get(id(p)) in self.pieces]}
            for group in own.param_groups
        ]
        for name, (piece, *values) in came.items():
            self.pieces[name].copy_(piece)
            state = own.state.get(self.dist._held.pieces[name], {})
            if not state:
                continue
            kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            kept.update(zip([key for key, _ in states[name]], values))
            self.optimizer.state[self.pieces[name]] = kept

    def _take_buffers(self):
        self.buffers, self.coming = self.coming, {}
