# SPDX-License-Identifier: Apache-2.0
"""Plans made and changed by a script (docs/guide/write-a-policy.md, docs/reference/plan-format.md).

    b = plan.new("trace.json", cluster="cluster.json", units=["layers.*"], name="mine")
    b.add_stream("gather", priority=-1)
    b.at("pre_forward", "layers.0").wait("ready", stream="gather").all_gather(...)
    made = b.build()
    made.verify()      # [] or what is wrong, in the verifier's words
    made.simulate()    # the report: times in ns, memory in bytes
    made.save("plan.json")

The document is JSON with the field names of the plan document; the command `shardplan` makes, verifies and simulates
it.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardplan.command import built_command
from shardplan.files import scratch_folder, write_text

Document = dict[str, Any]
ROOT = "(root)"  # how a unit of the model itself is written; its FQN is ""

# Instructions of the model and the training loop, whatever the schedule: all others are a policy's.
_OF_THE_MODEL = {"compute", "optimizer_step", "zero_grad"}
_OF_THE_OPTIMIZER = {"optimizer_state", "optimizer_temp"}


class PlanError(ValueError):
    """A name that the plan does not have, or an operand that does not fit; or the command refused a document."""


def new(
    trace: str | Path, *, cluster: str | Path, units: Iterable[str] = (), name: str = "script",
    flags: Sequence[str] = (),
) -> Builder:
    """A builder of a plan in which the model computes and the optimizer steps, and nothing else is done yet.

    Steps, triggers, segments, buffers and procedures are those of FSDP2's plan for `units` (rules as for `--unit`).
    `flags`: others of `shardplan plan`. The plan's policy is called `name`.
    """
    words = [
        "plan",
        str(trace),
        "--cluster",
        str(cluster),
        *(word for unit in units for word in ("--unit", unit)),
        *flags,
        "-q",
        "-o",
        "-",
    ]
    builder = Builder(_json(_run(words)), name=name)
    builder._keep_the_model()
    return builder


def read(path: str | Path) -> Plan:
    """The plan in a file, JSON or text."""
    return Plan(_json(_run(["show", str(path), "--json", "-o", "-"])))


class Plan:
    """A plan document."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def edit(self, name: str | None = None) -> Builder:
        """A builder that begins with this plan. `name`: of the policy; None: as it is."""
        return Builder(copy.deepcopy(self.document), name=name or self.document["policy"])

    def verify(self) -> list[str]:
        """The violations, in the verifier's words. Empty: the plan verifies. PlanError: it is no plan."""
        with scratch_folder() as folder:
            path = folder / "plan.json"
            self.save(path)
            done = _command(["validate", str(path)])
        if done.returncode not in (0, 1):
            raise PlanError(done.stderr.strip().replace(str(path), "the plan"))
        if done.returncode == 0:
            return []
        verdicts = done.stdout.split(f"{path}: ")[2:]  # the first is a summary
        return [verdict.rstrip("\n") for verdict in verdicts[:-1]]  # the last one is their number

    def simulate(self, cluster: str | Path | None = None) -> Document:
        """The report (docs/reference/report-format.md): `step_ns`, `memory.peak_bytes` and so on. `cluster`: instead of
        the plan's own.

        A plan that does not fit into the device's memory has a report, too: `memory.fits` is false. PlanError: it does
        not verify.
        """
        with scratch_folder() as folder:
            path = folder / "plan.json"
            self.save(path)
            done = _command(
                ["simulate", str(path), *(["--cluster", str(cluster)] if cluster else []), "--report", "-", "-q"]
            )
        if not done.stdout.startswith("{"):
            raise PlanError(done.stderr.strip().replace(str(path), "the plan"))
        return json.loads(done.stdout)

    def save(self, path: str | Path) -> None:
        """Writes the document."""
        write_text(Path(path), json.dumps(self.document, indent=1) + "\n")


class Builder:
    """A plan that is being written. Names are those of the document: units by FQN (or "(root)"), buffers, streams,
    events."""

    def __init__(self, document: Document, *, name: str) -> None:
        self._document = document
        self._document["policy"] = self._document["strategy"]["policy"] = name
        # These fields are about the document that a policy made.
        self._document.pop("known_faults", None)
        self._document.get("digests", {}).pop("program", None)
        self._document.get("digests", {}).pop("strategy", None)
        for step in self._steps:
            step["triggers"] = list(_written_out(step["triggers"]))

    @property
    def units(self) -> list[str]:
        """Their FQNs."""
        return [unit["fqn"] for unit in self._document["units"]]

    @property
    def buffers(self) -> dict[str, Document]:
        """By name, as in the document."""
        return {buffer["name"]: buffer for buffer in self._document["buffers"]}

    @property
    def streams(self) -> list[str]:
        return [stream["name"] for stream in self._document["streams"]]

    @property
    def events(self) -> list[str]:
        return list(self._document.get("events", []))

    def add_stream(self, name: str, priority: int = 0) -> str:
        """`priority` as torch.cuda.Stream's: -1 is higher. Gives the name back."""
        if name in self.streams:
            raise PlanError(f"there is a stream {name!r} already")
        self._document["streams"].append({"name": name, **({"priority": priority} if priority else {})})
        return name

    def add_event(self, name: str) -> str:
        """An event that is waited for before the script records it. Others are added where they are recorded."""
        if name not in self.events:
            self._document.setdefault("events", []).append(name)
        return name

    def add_buffer(self, name: str, **fields: Any) -> str:
        """`fields` are those of a buffer in the document: role, unit, dtype, parts_bytes, parameters, memory,
        persistent. Gives the name back."""
        if name in self.buffers:
            raise PlanError(f"there is a buffer {name!r} already")
        if "unit" in fields:
            fields["unit"] = self.unit(fields["unit"])
        self._document["buffers"].append({"name": name, **fields})
        return name

    def unit(self, name: str) -> str:
        """The FQN of a unit. PlanError: there is none of this name."""
        fqn = "" if name == ROOT else name
        if fqn not in self.units:
            raise PlanError(f"there is no unit {name!r}; expected {_one_of(unit or ROOT for unit in self.units)}")
        return fqn

    def at(
        self, kind: str, unit: str | None = None, *, microbatch: int | None = None, occurrence: int | None = None,
        step: str | None = None,
    ) -> Place:
        """The triggers of this kind that all given words fit, in all steps or in that of the name `step`."""
        steps = [s for s in self._steps if step in (None, s["name"])]
        if not steps:
            raise PlanError(f"there is no step {step!r}; expected {_one_of(s['name'] for s in self._steps)}")
        triggers = [trigger for s in steps for trigger in s["triggers"]]
        found = [trigger for trigger in triggers if trigger["kind"] == kind]
        if not found:
            raise PlanError(
                f"there is no trigger {kind!r}; expected {_one_of(trigger['kind'] for trigger in triggers)}"
            )
        wanted = {"microbatch": microbatch, "occurrence": occurrence}
        if unit is not None:
            fqn = self.unit(unit)
            of_unit = [trigger for trigger in found if trigger.get("unit") == fqn]
            if not of_unit:
                raise PlanError(
                    f"there is no trigger {kind!r} of {unit!r}; expected one of "
                    f"{_one_of(trigger.get('unit') or ROOT for trigger in found)}"
                )
            found = of_unit
        for field, value in wanted.items():
            of_value = [trigger for trigger in found if value in (None, trigger.get(field, 0))]
            if not of_value:
                raise PlanError(
                    f"there is no trigger {kind!r} with {field} {value}; expected "
                    f"{_one_of(str(trigger.get(field, 0)) for trigger in found)}"
                )
            found = of_value
        return Place(self, found)

    def build(self) -> Plan:
        """The plan as it is now; the builder may go on."""
        return Plan(copy.deepcopy(self._document))

    @property
    def _steps(self) -> list[Document]:
        return self._document["steps"]

    def _keep_the_model(self) -> None:
        for step in self._steps:
            for trigger in step["triggers"]:
                trigger["instructions"] = [i for i in trigger["instructions"] if self._is_of_the_model(i)]
        self._document["streams"] = self._document["streams"][:1]  # the model's
        self._document["events"] = sorted(
            {
                i["event"]
                for procedure in self._document.get("procedures", [])
                for i in procedure["instructions"]
                if "event" in i
            }
        )
        for procedure in self._document.get("procedures", []):
            assert all(i.get("stream", "compute") == "compute" for i in procedure["instructions"]), (
                "procedures run on the compute stream"
            )

    def _is_of_the_model(self, instruction: Document) -> bool:
        buffer = self.buffers.get(instruction.get("dst") or instruction.get("src", ""), {})
        return instruction["kind"] in _OF_THE_MODEL or buffer.get("role") in _OF_THE_OPTIMIZER

    def _known(self, field: str, value: str) -> str:
        known = {
            "event": self.events,
            "stream": self.streams,
            "communicator": [c["name"] for c in self._document.get("communicators", [])],
        }.get(field, list(self.buffers))
        if value not in known:
            word = field if field in ("event", "stream", "communicator") else "buffer"
            raise PlanError(f"{field}: there is no {word} {value!r}; expected {_one_of(known)}")
        return value

    def _unit_of(self, buffers: Iterable[str]) -> str | None:
        return next((self.buffers[name]["unit"] for name in buffers if "unit" in self.buffers[name]), None)

    def _communicator(self, unit: str | None, field: str) -> str:
        found = next((u.get(field) for u in self._document["units"] if u["fqn"] == unit), None)
        if found is None:
            raise PlanError(f"communicator: unit {unit!r} has no {field}; expected a communicator by name")
        return found


class Place:
    """A place for instructions: some triggers, before the work of the model or the optimizer there. They follow each
    other.

    Each method issues one instruction and gives the place back. Operands are names. The unit and the communicator of an
    instruction are those of its buffers, where none is given.
    """

    def __init__(self, builder: Builder, triggers: list[Document], *, after: bool = False) -> None:
        self._builder = builder
        self._triggers = triggers
        self._after = after

    def after(self) -> Place:
        """The same triggers, behind what the model or the optimizer does there."""
        return Place(self._builder, self._triggers, after=True)

    def allocate(self, dst: str, *, stream: str = "compute", unit: str | None = None, reason: str = "script") -> Place:
        return self.issue("allocate", dst=dst, stream=stream, unit=unit, reason=reason)

    def free(
        self, src: str, *, stream: str = "compute", safe_after: Sequence[str] = (), unit: str | None = None,
        reason: str = "script",
    ) -> Place:
        return self.issue("free", src=src, stream=stream, safe_after=list(safe_after) or None, unit=unit, reason=reason)

    def bind_unsharded(self, src: str, *, unit: str | None = None, reason: str = "script") -> Place:
        return self.issue("bind_unsharded", src=src, unit=unit, reason=reason)

    def bind_sharded(self, src: str, *, unit: str | None = None, reason: str = "script") -> Place:
        return self.issue("bind_sharded", src=src, unit=unit, reason=reason)

    def copy_in(
        self, src: str, dst: str, *, stream: str = "compute", communicator: str | None = None, unit: str | None = None,
        reason: str = "script",
    ) -> Place:
        return self.issue(
            "copy_in", src=src, dst=dst, stream=stream, communicator=communicator, unit=unit, reason=reason
        )

    def all_gather(
        self, src: str, dst: str, *, stream: str = "compute", communicator: str | None = None, unit: str | None = None,
        reason: str = "script",
    ) -> Place:
        return self.issue(
            "all_gather", src=src, dst=dst, stream=stream, communicator=communicator, unit=unit, reason=reason
        )

    def copy_out(
        self, src: str, dst: str, *, stream: str = "compute", unit: str | None = None, reason: str = "script"
    ) -> Place:
        return self.issue("copy_out", src=src, dst=dst, stream=stream, unit=unit, reason=reason)

    def grad_copy_in(
        self, src: str, dst: str, *, stream: str = "compute", unit: str | None = None, reason: str = "script"
    ) -> Place:
        return self.issue("grad_copy_in", src=src, dst=dst, stream=stream, unit=unit, reason=reason)

    def grad_scale(
        self, src: str, divisor: float, *, stream: str = "compute", unit: str | None = None, reason: str = "script"
    ) -> Place:
        return self.issue("grad_scale", src=src, divisor=divisor, stream=stream, unit=unit, reason=reason)

    def reduce_scatter(
        self, src: str, dst: str, *, reduce_op: str = "average", divisor: float | None = None, stream: str = "compute",
        communicator: str | None = None, unit: str | None = None, reason: str = "script",
    ) -> Place:  # fmt: skip
        return self.issue(
            "reduce_scatter", src=src, dst=dst, reduce_op=reduce_op, divisor=divisor, stream=stream,
            communicator=communicator, unit=unit, reason=reason,
        )

    def all_reduce(
        self, src: str, *, reduce_op: str = "average", divisor: float | None = None, stream: str = "compute",
        communicator: str | None = None, unit: str | None = None, reason: str = "script",
    ) -> Place:  # fmt: skip
        return self.issue(
            "all_reduce", src=src, reduce_op=reduce_op, divisor=divisor, stream=stream, communicator=communicator,
            unit=unit, reason=reason,
        )

    def grad_cast(
        self, src: str, dst: str, *, stream: str = "compute", unit: str | None = None, reason: str = "script"
    ) -> Place:
        return self.issue("grad_cast", src=src, dst=dst, stream=stream, unit=unit, reason=reason)

    def grad_accumulate(
        self, src: str, dst: str, *, stream: str = "compute", unit: str | None = None, reason: str = "script"
    ) -> Place:
        return self.issue("grad_accumulate", src=src, dst=dst, stream=stream, unit=unit, reason=reason)

    def record(self, event: str, *, stream: str, unit: str | None = None, reason: str = "script") -> Place:
        """Adds the event where there is none of this name."""
        return self.issue("record", event=self._builder.add_event(event), stream=stream, unit=unit, reason=reason)

    def wait(self, event: str, *, stream: str, unit: str | None = None, reason: str = "script") -> Place:
        return self.issue("wait", event=event, stream=stream, unit=unit, reason=reason)

    def host_wait(self, event: str, *, unit: str | None = None, reason: str = "script") -> Place:
        return self.issue("host_wait", event=event, unit=unit, reason=reason)

    def issue(self, kind: str, **operands: Any) -> Place:
        """Any instruction, with the fields of the plan document; None: left out."""
        instruction = {"kind": kind, **{field: value for field, value in operands.items() if value is not None}}
        buffers = [self._builder._known(field, instruction[field]) for field in ("src", "dst") if field in instruction]
        for field in ("event", "stream", "communicator"):
            if field in instruction:
                self._builder._known(field, instruction[field])
        for stream in instruction.get("safe_after", []):
            self._builder._known("stream", stream)
        if "unit" in instruction:
            instruction["unit"] = self._builder.unit(instruction["unit"])
        elif (unit := self._builder._unit_of(buffers)) is not None:
            instruction["unit"] = unit
        if "communicator" not in instruction and kind in ("copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            field = "replicate_communicator" if kind == "all_reduce" else "shard_communicator"
            instruction["communicator"] = self._builder._communicator(instruction.get("unit"), field)
        for trigger in self._triggers:
            instructions = trigger["instructions"]
            instructions.insert(
                len(instructions) if self._after else self._before_the_model(instructions), dict(instruction)
            )
        return self

    def remove(self, kind: str, **operands: Any) -> Place:
        """Takes out every instruction of this kind that has these operands. PlanError: there is none."""

        def matches(instruction: Document) -> bool:
            return instruction["kind"] == kind and all(
                instruction.get(field) == value for field, value in operands.items()
            )

        before = [i for trigger in self._triggers for i in trigger["instructions"]]
        if not any(map(matches, before)):
            words = " ".join([kind, *(f"{field}={value}" for field, value in operands.items())])
            raise PlanError(
                f"there is no instruction {words!r}; expected one of the kinds {_one_of(i['kind'] for i in before)}"
            )
        for trigger in self._triggers:
            trigger["instructions"] = [i for i in trigger["instructions"] if not matches(i)]
        return self

    def instructions(self) -> list[Document]:
        """Instructions of the first of the triggers, as in the document."""
        return copy.deepcopy(self._triggers[0]["instructions"])

    def _before_the_model(self, instructions: list[Document]) -> int:
        return next(
            (k for k, instruction in enumerate(instructions) if self._builder._is_of_the_model(instruction)),
            len(instructions),
        )


def _written_out(triggers: Iterable[Document]) -> Iterator[Document]:
    """Without repetitions (docs/reference/plan-format.md)."""
    written: list[Document] = []
    for trigger in triggers:
        if "repeat" not in trigger:
            written.append(trigger)
            continue
        period = written[-trigger["repeat"]["triggers"] :]
        for time in range(1, trigger["repeat"]["times"] + 1):
            written += [_later(of_period, time) for of_period in period]
    yield from written


def _later(trigger: Document, by: int) -> Document:
    later = copy.deepcopy(trigger)
    for holder in (later, *(i for i in later["instructions"] if i["kind"] == "compute")):
        holder["microbatch"] = holder.get("microbatch", 0) + by
    return later


def _one_of(names: Iterable[str]) -> str:
    unique = sorted(set(names))
    return ", ".join(unique) if unique else "none, there is none"


def _command(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([built_command("plan"), *words], capture_output=True, text=True, check=False)


def _run(words: list[str]) -> str:
    done = _command(words)
    if done.returncode != 0:
        raise PlanError(done.stderr.strip().removeprefix("shardplan: error: "))
    return done.stdout


def _json(text: str) -> Document:
    return json.loads(text)
