# SPDX-License-Identifier: Apache-2.0
"""The memory of a plan's steps again, from docs/reference/memory.md alone (naive_simulator.py)."""

import collections

from naive_simulator import FLAT_ROLES, SIZES, Alive, numel


class Memory:
    """One allocation of a buffer, under one or several names: bytes by part."""

    def __init__(self, parts, category):
        self.names, self.parts, self.category = 1, parts, category


class Walk:
    """Every allocation and free in host order. space: "device" or "host"."""

    def __init__(self, document, space, becomes=None):
        self.document, self.space = document, space
        # Categories of memory that ends under another name, by the number of its allocation: known after a first walk.
        self.becomes, self.ends_as = becomes or {}, {}
        self.made = 0
        self.alive = Alive(document)
        self.memory = {}  # by buffer
        self.number = {}  # of the allocation, by buffer
        self.storages = {}  # (storage, micro-batch): (bytes, category)
        self.now = collections.Counter()
        self.peak, self.peak_by, self.step_peak, self.step_by = 0, {}, 0, {}
        self.gradients = collections.defaultdict(list)  # buffers by unit
        for i, buffer in enumerate(document.buffers):
            if buffer["role"] == "grad_unsharded" and buffer.get("unit") is not None:
                self.gradients[document.at("unit", buffer["unit"])].append(i)
        self.implied_optimizer = all(b["role"] not in ("optimizer_state", "optimizer_temp") for b in document.buffers)

    def rounded(self, amount):
        return -(-amount // 512) * 512 if self.space == "device" else amount

    def change(self, category, amount):
        """+ taken, - given back."""
        self.now[category] += self.rounded(amount) if amount > 0 else -self.rounded(-amount)
        total = sum(self.now.values())
        if amount > 0 and total > self.step_peak:
            self.step_peak, self.step_by = total, dict(self.now)

    def run(self):
        document, plan = self.document, self.document.plan
        for i, buffer in enumerate(document.buffers):
            if buffer.get("persistent", False):
                self.allocate(i, by_instruction=False)
        if self.space == "device":
            for buffer in plan.get("model_buffers", []):
                self.change("buffer", numel(buffer["shape"]) * SIZES[buffer["dtype"]])
        if len(plan["steps"]) == 1:
            self.step(plan["steps"][0])
        for step in plan["steps"]:
            self.step_peak, self.step_by = sum(self.now.values()), dict(self.now)
            self.step(step)
            if self.step_peak >= self.peak:
                self.peak, self.peak_by = self.step_peak, self.step_by
        return self

    def step(self, step):
        batches = 1 + max([t.get("microbatch", 0) for t in step["triggers"]] + [0]) if self.space == "device" else 0
        inputs = [numel(t["shape"]) * SIZES[t["dtype"]] for t in self.document.plan.get("inputs", [])] * batches
        for amount in inputs:
            self.change("input", amount)
        for trigger in step["triggers"]:
            for instruction in trigger["instructions"]:
                if not self.moves_activations(instruction, trigger.get("microbatch", 0)):
                    self.pass_by(instruction)
        for amount in inputs:
            self.change("input", -amount)

    def moves_activations(self, instruction, microbatch):
        """An allocate or free of activations is that of all their storages."""
        if instruction["kind"] not in ("allocate", "free"):
            return False
        buffer = self.document.buffers[
            self.document.ref(instruction, "dst" if instruction["kind"] == "allocate" else "src")
        ]
        if buffer["role"] != "activation":
            return False
        for storage, amount in (
            zip(buffer["storages"], buffer["parts_bytes"], strict=True) if self.space == "device" else ()
        ):
            self.forget((storage, microbatch))
            if instruction["kind"] == "allocate":
                self.storages[storage, microbatch] = amount, "saved"
                self.change("saved", amount)
        self.alive.take(instruction)
        return True

    def pass_by(self, instruction):
        document, kind = self.document, instruction["kind"]
        if kind in ("compute", "orthogonalize") and self.space == "device":
            self.segment(
                document.plan["segments"][document.ref(instruction, "segment")], instruction.get("microbatch", 0)
            )
        elif kind == "allocate":
            self.allocate(document.ref(instruction, "dst"))
        elif kind == "free":
            self.free(document.ref(instruction, "src"), instruction.get("parts"))
        elif self.alive.is_view(instruction):
            src, dst = document.ref(instruction, "src"), document.ref(instruction, "dst")
            if self.number.get(src) is not None:
                self.ends_as[self.number[src]] = document.buffers[dst]["role"]
            if src in self.memory and dst not in self.memory:
                self.memory[dst], self.number[dst] = self.memory[src], self.number.get(src)
                self.memory[src].names += 1
        elif kind == "optimizer_step" and self.implied_optimizer:
            optimizer = document.plan["strategy"].get("optimizer", {})
            takes = any(optimizer.get(word, False) for word in ("momentum", "weight_decay", "maximize"))
            nothing = optimizer.get("kind", "adamw") == "none" or (optimizer.get("kind") == "sgd" and not takes)
            assert nothing or not any(document.shards_of(u) for u in document.units), (
                "the plan's buffers say what the optimizer keeps"
            )
        elif kind == "zero_grad":
            for buffer in list(self.alive.dropped_by_zero_grad(instruction)):
                self.free(buffer)
        self.alive.take(instruction)

    def allocate(self, b, by_instruction=True):
        if b in self.memory:
            return
        buffer = self.document.buffers[b]
        self.made += by_instruction
        self.number[b] = self.made if by_instruction else None
        self.memory[b] = Memory({}, self.becomes.get(self.number[b], buffer["role"]))
        if (buffer.get("memory", "device") == "device") != (self.space == "device"):
            return
        parts = dict(enumerate(buffer["parts_bytes"]))
        if parts and buffer["role"] in FLAT_ROLES:
            parts = {0: sum(parts.values())}
        if buffer.get("memory") == "pinned_host":
            parts = {p: 1 << (amount - 1).bit_length() if amount > 0 else amount for p, amount in parts.items()}
        self.memory[b].parts = parts
        for amount in parts.values():
            self.change(self.memory[b].category, amount)

    def free(self, b, parts=None):
        unit = self.document.at("unit", self.document.buffers[b].get("unit"))
        if self.document.buffers[b]["role"] == "grad_unsharded" and len(self.gradients[unit]) > 1:
            self.free_gradients(b, unit, parts)
        elif parts:
            for part in parts:
                self.drop(self.memory.get(b), part)
        elif b in self.memory:
            memory = self.memory.pop(b)
            memory.names -= 1
            if memory.names == 0:
                for part in list(memory.parts):
                    self.drop(memory, part)

    def drop(self, memory, part):
        if memory is not None and part in memory.parts:
            self.change(memory.category, -memory.parts.pop(part))

    def part_of(self, b, parameter):
        """Which part of the buffer holds the parameter; None: none does."""
        buffer = self.document.buffers[b]
        parameters = buffer.get("parameters", [])
        if not parameters:
            return 0
        if parameter not in parameters:
            return None
        return parameters.index(parameter) if len(parameters) == len(buffer["parts_bytes"]) else 0

    def free_gradients(self, b, unit, parts):
        for p, parameter in enumerate(self.document.buffers[b].get("parameters", [])):
            if parts and p not in parts:
                continue
            for holder in self.gradients[unit]:
                part = self.part_of(holder, parameter)
                if holder in self.memory and part in self.memory[holder].parts:
                    self.drop(self.memory[holder], part)
                    break

    def segment(self, segment, microbatch):
        new = []  # bytes of what was allocated for gradients
        for entry in segment["entries"]:
            if entry[0] == "+":
                _, storage, amount, role, *_ = entry
                category = "grad_unsharded" if role == "parameter_grad" else role
                if role == "parameter_grad":
                    new.append(amount)
                else:
                    self.forget((storage, microbatch))
                    self.storages[storage, microbatch] = amount, category
                self.change(category, amount)
            elif entry[0] == "-":
                self.forget((entry[1], microbatch))
        missing = []
        for grad in segment.get("grads", []):
            unit, parameter = self.document.at("unit", grad["unit"]), grad["parameter"]
            for b in self.gradients[unit]:
                part = self.part_of(b, parameter)
                if part is None or part >= len(self.document.buffers[b]["parts_bytes"]):
                    continue
                wanted = self.document.buffers[b]["parts_bytes"][part]
                memory = self.memory.setdefault(b, Memory({}, "grad_unsharded"))
                if part not in memory.parts:
                    if wanted in new:
                        new.remove(wanted)
                        memory.parts[part] = wanted
                    else:
                        missing.append((memory, part, wanted))
                break
        for amount in new:
            self.change("grad_unsharded", -amount)
        for memory, part, wanted in missing:
            if part not in memory.parts:
                memory.parts[part] = wanted
                self.change("grad_unsharded", wanted)

    def forget(self, key):
        if key in self.storages:
            amount, category = self.storages.pop(key)
            self.change(category, -amount)


def profile(document, space):
    """The walk of a plan with its peak, its categories there, and what is left."""
    first = Walk(document, space).run()
    return Walk(document, space, first.ends_as).run()
