# SPDX-License-Identifier: Apache-2.0
"""The simulator again, from docs/internals/simulator.md and docs/reference/memory.md alone: slow, simple, and without a
line of the product.

It reads the plan and cluster documents and gives the report's figures, the spans of every instruction, and the peaks of
memory."""

import collections
import decimal
import json
import pathlib
from fractions import Fraction

decimal.getcontext().prec = 60

SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4,
    "uint64": 8, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}
COPIES = {
    "copy_in", "copy_out", "reshard_post_forward", "grad_copy_in", "grad_scale", "grad_zero", "grad_cast",
    "grad_accumulate", "copy_to_host", "copy_to_device",
}
COLLECTIVES = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"}
COLLECTIVES |= {"update_gather": "all_gather"}
UPDATES = {"update_copy_in", "update_apply"}
CHAINS, EXCHANGES, TRANSFERS = ("broadcast", "reduce"), ("all_to_all", "gather", "scatter"), ("send", "recv")
# Data, not code.
CLASSES = json.loads(
    (
        pathlib.Path(__file__).parents[3]
        / "tools"
        / "python"
        / "shardplan"
        / "import_profile"
        / "operator_classes.json"
    ).read_text()
)
HOOKS = {"pre_forward", "post_forward", "pre_backward", "post_backward", "backward_end"}
MATRIX = set(next(entry["names"] for entry in CLASSES if entry["class"] == "matmul"))
MATRIX_CLASSES = {"matmul", "attention", "convolution"}
FLAT_ROLES = {
    "grad_sharded", "reduce_scatter_output", "partial_reduce_output", "inner_reduce_output", "inner_reduce_accumulated",
}
MILLION = 10**6
# The expected largest of 1, 2, 4, ... samples of a standard normal distribution, in millionths.
LARGEST = [0, 564190, 1029375, 1423600, 1765991, 2069669, 2343733, 2594610, 2826790, 3043650, 3247690, 3440700, 3624300]


# ---- arithmetic ----
def nearest(value):
    """To the nearest integer, halves away from zero."""
    value = Fraction(value)
    sign = -1 if value < 0 else 1
    return sign * int(abs(value) + Fraction(1, 2))


def up(value):
    return -int(-Fraction(value) // 1)


def time_at(amount, rate):
    return up(Fraction(amount * 10**9, rate)) if rate > 0 and amount > 0 else 0


LOG_2 = decimal.Decimal(2).ln()


def log(value):
    """Base 2, 32 fractional bits, down."""
    whole = value.bit_length() - 1
    if value == 1 << whole:
        return whole << 32
    return int(decimal.Decimal(value).ln() / LOG_2 * (1 << 32))


# ---- the documents ----
def is_collective(event):
    """Whether an entry of a segment is a collective of the model."""
    return event[0] == "op" and len(event) > 11


def written_out(plan):
    """The plan with the triggers that a repetition stands for."""
    steps = []
    for step in plan["steps"]:
        triggers = []
        for entry in step["triggers"]:
            if "repeat" not in entry:
                triggers.append(entry)
                continue
            for _ in range(entry["repeat"]["triggers"] * entry["repeat"]["times"]):
                again = json.loads(json.dumps(triggers[-entry["repeat"]["triggers"]]))
                for part in [again, *(i for i in again["instructions"] if i["kind"] == "compute")]:
                    part["microbatch"] = part.get("microbatch", 0) + 1
                triggers.append(again)
        steps.append(step | {"triggers": triggers})
    return plan | {"steps": steps}


class Document:
    """A plan with the references of its instructions resolved to positions."""

    def __init__(self, plan, cluster=None):
        plan = written_out(plan)
        self.plan = plan
        self.cluster = cluster or plan["cluster"]
        self.units = plan["units"]
        self.buffers = plan["buffers"]
        self.streams = list(plan["streams"])
        self.names = {
            "unit": [u["fqn"] for u in self.units],
            "src": [b["name"] for b in self.buffers],
            "stream": [s["name"] for s in plan["streams"]],
            "event": plan["events"],
            "communicator": [c["name"] for c in plan["communicators"]],
            "segment": [s["name"] for s in plan["segments"]],
            "exchange": [e["name"] for e in plan.get("exchanges", [])],
        }
        self.names["dst"] = self.names["src"]
        self.positions = {
            field: {name: i for i, name in reversed(list(enumerate(names)))} for field, names in self.names.items()
        }
        used = [event[11] for segment in plan["segments"] for event in segment["entries"] if is_collective(event)]
        self.stream_of_model = {}
        for group in sorted({self.at("communicator", collective["communicator"]) for collective in used}):
            self.stream_of_model[group] = len(self.streams)
            self.streams.append({"name": "model " + plan["communicators"][group]["name"]})

    def at(self, field, value):
        """A reference: a name, or the position of something whose name is not unique. None: left out."""
        if value is None or isinstance(value, int):
            return value
        return self.positions[field][value]

    def ref(self, item, field):
        return self.at(field, item.get(field))

    def shards_of(self, unit):
        """(parameter, elements, dtype) of every shard of a unit that the optimizer steps, as rank 0 has them."""
        parameters = list(enumerate(unit["parameters"]))
        trained = [(i, p) for i, p in parameters if p.get("requires_grad", True) and not p.get("muon", False)]
        ranks = self.ranks_of(unit)
        if unit.get("layout", "per_parameter") == "per_parameter":
            return [(i, piece_of(p, ranks), p.get("dtype", "float32")) for i, p in trained]
        end = unit.get("flat_numel", 0) // ranks
        if self.plan["policy"] == "fsdp1" and self.plan["strategy"].get("fsdp1", {}).get("use_orig_params", False):
            if ranks == 1:
                return [(i, numel(p["shape"]), unit["orig_dtype"]) for i, p in trained]
            pieces = [
                (i, min(numel(p["shape"]), end - p.get("flat_offset", 0)), unit["orig_dtype"]) for i, p in trained
            ]
            return [piece for piece in pieces if piece[1] > 0]
        return [(0, end, unit["orig_dtype"])] if trained else []

    def ranks_of(self, unit):
        group = self.at("communicator", unit.get("shard_communicator"))
        return 1 if group is None else self.plan["communicators"][group]["size"]

    def bytes_of(self, buffer):
        return sum(self.buffers[buffer]["parts_bytes"])

    def memory_of(self, buffer):
        return self.buffers[buffer].get("memory", "device")


def numel(shape):
    product = 1
    for size in shape:
        product *= size
    return product


def piece_of(parameter, ranks):
    shape = parameter["shape"]
    if not shape:
        return 1
    rows = shape[parameter.get("shard_dim", 0)]
    return numel(shape) // rows * min(rows, -(-rows // ranks)) if rows else 0


class Alive:
    """Which buffers are alive, and which casts are views (docs/reference/plan-format.md, "Lifetimes")."""

    def __init__(self, document):
        self.document = document
        self.alive = {i for i, b in enumerate(document.buffers) if b.get("persistent", False)}

    def is_view(self, instruction):
        if instruction["kind"] != "grad_cast":
            return False
        src, dst = self.document.ref(instruction, "src"), self.document.ref(instruction, "dst")
        same = self.document.buffers[src]["dtype"] == self.document.buffers[dst]["dtype"]
        return same and self.document.memory_of(src) == self.document.memory_of(dst) and dst not in self.alive

    def dropped_by_zero_grad(self, instruction):
        unit = self.document.ref(instruction, "unit")
        for i, buffer in enumerate(self.document.buffers):
            mine = unit is None or self.document.at("unit", buffer.get("unit")) == unit
            if buffer["role"] in ("grad_sharded", "grad_host") and mine and not buffer.get("persistent", False):
                yield i

    def take(self, instruction):
        kind = instruction["kind"]
        if kind == "allocate" or self.is_view(instruction):
            self.alive.add(self.document.ref(instruction, "dst"))
        elif kind == "free" and not instruction.get("parts"):
            self.alive.discard(self.document.ref(instruction, "src"))
        elif kind == "zero_grad":
            self.alive -= set(self.dropped_by_zero_grad(instruction))


# ---- costs ----
class Costs:
    def __init__(self, document):
        self.document = document
        self.cluster = document.cluster
        device = self.cluster["device"]
        self.device = device
        self.overhead = device.get("kernel_overhead_ns", 0)
        self.host = self.cluster.get("host", {})
        self.groups = {}
        self.fits = {}

    def memory(self, moved):
        curve = self.device.get("memory_efficiency", [])
        part = (
            efficiency([{"flops": p["moved_bytes"]} | p for p in curve], moved)
            if curve
            else self.device.get("memory_efficiency_ppm", MILLION)
        )
        return time_at(moved, nearest(Fraction(self.device.get("memory_bytes_per_second", 0) * part, MILLION)))

    def move(self, moved):
        if moved <= 0 or self.device.get("memory_bytes_per_second", 0) == 0:
            return 0
        return self.of_slowest(max(self.memory(moved), self.overhead))

    def host_work(self, moved):
        return time_at(moved, self.host.get("memory_bytes_per_second", 0))

    def operator(self, event):
        _, name, _, dtype, flops, read, written, duration, *_ = event
        if duration >= 0:
            return duration
        arithmetic = time_at(flops, self.device.get("vector_flops_per_second", 0))
        if is_matrix(name):
            for entry in self.rates_of(name, dtype):
                if entry["dtype"] == dtype:
                    rate = nearest(
                        Fraction(entry["flops_per_second"] * efficiency(entry.get("efficiency", []), flops), MILLION)
                    )
                    arithmetic = time_at(flops, rate)
                    elements = written // SIZES[dtype]
                    inner = nearest(Fraction(flops, 2 * elements)) if elements else 0
                    if entry.get("shapes") and plain(name) in MATRIX and inner > 0:
                        arithmetic = of_shape(entry["shapes"], elements, inner)
                    if class_of(name) == "attention":
                        products, outputs = (10, 3) if "backward" in plain(name) else (4, 1)
                        sequence = max(1, nearest(Fraction(flops * outputs * SIZES[dtype], products * max(1, written))))
                        arithmetic = up(
                            Fraction(arithmetic * (sequence + entry.get("half_rate_sequence", 0)), sequence)
                        )
                    break
        arithmetic = up(Fraction(arithmetic * MILLION, self.device.get("clock_ppm", MILLION)))
        moved = self.memory(read + written)
        for rate in self.device.get("class_rates", []):
            if rate["operator_class"] == class_of(name):
                moved = up(Fraction(moved * MILLION, rate["memory_rate_ppm"]))
                break
        issue = self.host.get("operator_issue_ns", 0) if self.host.get("runs_kernels") else 0
        return self.of_slowest(max(arithmetic, moved, self.overhead)) + issue

    def of_slowest(self, duration):
        """The slowest of all ranks: expected maxima of normal samples, straight lines between powers of two."""
        ranks, power = self.cluster["ranks"], 0
        while power + 2 < len(LARGEST) and 2 << power <= ranks:
            power += 1
        start = 1 << power
        largest = LARGEST[power] + nearest(Fraction((LARGEST[power + 1] - LARGEST[power]) * (ranks - start), start))
        return up(
            Fraction(
                duration * (MILLION + nearest(Fraction(self.device.get("spread_ppm", 0) * largest, MILLION))), MILLION
            )
        )

    def rates_of(self, name, dtype):
        lists = ["matmul"]
        if class_of(name) == "attention":
            lists = ["attention_backward"] * ("backward" in plain(name)) + ["attention", "matmul"]
        return next(
            (
                rates
                for rates in (self.device.get(field, []) for field in lists)
                if any(r["dtype"] == dtype for r in rates)
            ),
            [],
        )

    def moved(self, instruction):
        """(read, written) of a copy."""
        document, kind = self.document, instruction["kind"]
        if kind == "grad_zero":
            return 0, document.bytes_of(document.ref(instruction, "dst"))
        src = document.ref(instruction, "src")
        dst = src if kind == "grad_scale" else document.ref(instruction, "dst")
        read, written = document.bytes_of(src), document.bytes_of(dst)
        of_src, of_dst = (SIZES[document.buffers[b]["dtype"]] for b in (src, dst))
        if kind in ("copy_in", "reshard_post_forward"):
            elements = min(read // of_src, written // of_dst)
            return elements * of_src, elements * of_dst
        if kind == "grad_copy_in":
            parameters = [len(document.buffers[b].get("parameters", [])) for b in (src, dst)]
            return read, read // of_src * of_dst if parameters[0] < parameters[1] else written
        if kind == "grad_accumulate":
            return read + written, written
        return read, written

    def copy(self, instruction):
        read, written = self.moved(instruction)
        if instruction["kind"] in ("copy_to_host", "copy_to_device"):
            amount = read if instruction["kind"] == "copy_to_host" else written
            return time_at(amount, self.cluster.get("host_link_bytes_per_second", 0))
        return self.host_work(read + written) if instruction.get("stream") is None else self.move(read + written)

    # -- the optimizer --
    def passes(self):
        optimizer = self.document.plan["strategy"].get("optimizer", {})
        kind = optimizer.get("kind", "adamw")
        way = optimizer.get("implementation", "for_loop" if kind == "adafactor" else "foreach")
        fused = way == "fused"
        read = written = kernels = by_shard = 0
        extras = []
        if kind in ("adamw", "adam"):
            read, written, kernels = (4, 3, 1) if fused else (12, 8, 8)
            extras = [("amsgrad", (1, 1, 0) if fused else (2, 1, 1))]
        elif kind == "sgd":
            read, written, kernels = 2, 1, 1
            extras = [("momentum", (1, 1, 0))] if fused else [("momentum", (3, 2, 2)), ("nesterov", (2, 1, 1))]
        elif kind == "adafactor":
            read, written, kernels, by_shard = 11, 6, 12, 7
        if kind != "none" and not fused:
            extras.append(("maximize", (1, 1, 1)))
            if kind in ("sgd", "adam"):
                extras.append(("weight_decay", (2, 1, 1)))
        for field, (more_read, more_written, more_kernels) in extras:
            if optimizer.get(field, False):
                read, written, kernels = read + more_read, written + more_written, kernels + more_kernels
        return read, written, kernels, by_shard, way == "for_loop"

    def optimizer(self, instruction):
        """{"device" or "host": (bytes read, bytes written, kernels)}"""
        document = self.document
        unit, parameter = document.ref(instruction, "unit"), instruction.get("parameter", -1)
        read, written, kernels, by_shard, loops = self.passes()
        result = {}
        for place in ("device", "host"):
            shards = []
            for u, owner in enumerate(document.units):
                held = [
                    b
                    for b in document.buffers
                    if b["role"] == "param_sharded" and document.at("unit", b.get("unit")) == u
                ]
                if (
                    unit not in (None, u)
                    or not held
                    or (held[-1].get("memory", "device") == "device") != (place == "device")
                ):
                    continue
                shards += document.shards_of(owner)
            amount = sum(elements * SIZES[dtype] for _, elements, dtype in shards)
            count = len(shards)
            if unit is not None and parameter >= 0:
                owner, count = document.units[unit], 1
                if owner.get("layout", "per_parameter") == "per_parameter":
                    amount = sum(elements * SIZES[dtype] for p, elements, dtype in shards if p == parameter)
                else:
                    total = sum(numel(p["shape"]) for p in owner["parameters"] if p.get("requires_grad", True))
                    amount = (
                        nearest(Fraction(amount * numel(owner["parameters"][parameter]["shape"]), total))
                        if total
                        else 0
                    )
            if amount == 0:
                count = kernels_here = 0
            else:
                kernels_here = kernels * (count if loops else 1) + by_shard * count
            result[place] = (amount * read, amount * written, kernels_here)
        return result

    def update(self, instruction):
        """(bytes read, bytes written, kernels) of an exchange's beginning or end on the first rank."""
        plan = self.document.plan
        exchange = plan["exchanges"][self.document.ref(instruction, "exchange")]
        nesterov = plan["strategy"].get("optimizer", {}).get("muon", {}).get("nesterov", True)
        read = written = kernels = 0
        for matrix in exchange["matrices"]:
            unit = self.document.units[self.document.at("unit", matrix["unit"])]
            parameter = unit["parameters"][matrix["parameter"]]
            columns = parameter["shape"][-1]
            first = matrix.get("first_row", 0)
            end = piece_of(parameter, self.document.ranks_of(unit)) // columns
            if matrix.get("rows"):
                end = min(end, first + matrix["rows"])
            elements = max(0, end - first) * columns
            if elements == 0:
                continue
            dtype = parameter.get("dtype", "float32")
            own = elements * SIZES[dtype]
            gradient = elements * SIZES[parameter.get("grad_dtype", dtype)]
            piece = elements * SIZES[exchange.get("dtype", "bfloat16")]
            if instruction["kind"] == "update_apply":
                read, written, kernels = read + 2 * own + piece, written + 2 * own, kernels + 2
            else:
                read += (5 if nesterov else 3) * gradient
                written += (2 if nesterov else 1) * gradient + piece
                kernels += 3 if nesterov else 2
        return read, written, kernels

    def issue(self, segment, on_plain_matrix):
        """(of the host, of the kernel) for each operator."""
        of_model = self.host.get("operator_issue_ns", 0)
        of_all = of_model
        if segment.get("phase", "forward") == "optimizer" and not on_plain_matrix:
            of_all = max(of_model, self.host.get("optimizer_issue_ns", 0))
        return (0, of_all - of_model) if self.host.get("runs_kernels") else (of_all, 0)

    # -- collectives --
    def placements(self, group):
        """Placement of every group of the communicator: nodes, fewest and most members in a node, groups in one of its
        nodes."""
        if group in self.groups:
            return self.groups[group]
        communicator = self.document.plan["communicators"][group]
        dims = communicator.get("dims") or [{"size": communicator["size"], "stride": communicator.get("stride", 1)}]
        node = min(self.cluster.get("ranks_per_node", 8), self.cluster["ranks"])
        world = max([self.document.plan["world_size"]] + [d["size"] * d["stride"] for d in dims])
        members = collections.defaultdict(collections.Counter)
        for rank in range(world):
            digits = tuple(rank // d["stride"] % d["size"] for d in dims)
            rest = rank - sum(digit * d["stride"] for digit, d in zip(digits, dims, strict=True))
            members[rest][rank // node] += 1
        here = collections.Counter(n for nodes in members.values() for n in nodes)
        pod = self.cluster.get("links", [{}, {}])[1:2]
        pod = pod[0].get("pod_nodes", 0) if pod else 0
        pod = pod or world + 1
        self.groups[group] = sorted(
            {
                (
                    len(nodes),
                    min(nodes.values()),
                    max(nodes.values()),
                    max(here[n] for n in nodes),
                    len({n // pod for n in nodes}) > 1,
                )
                for nodes in members.values()
            }
        )
        return self.groups[group]

    def collective(self, instruction):
        """(duration, loads of the two links, where the cost is from)"""
        document, kind = self.document, COLLECTIVES[instruction["kind"]]
        whole = document.ref(instruction, "dst" if kind == "all_gather" else "src")
        return self.of_all(kind, document.ref(instruction, "communicator"), document.bytes_of(whole))

    def of_all(self, kind, group, amount):
        """The cost of all groups of the communicator at once: the slowest counts, the first among equals."""
        ranks = self.document.plan["communicators"][group]["size"]
        if ranks == 1:
            return 0, (0, 0), "one rank"
        best = None
        for placement in self.placements(group):
            cost = self.of_group(kind, ranks, amount, *placement)
            if best is None or cost[0] > best[0]:
                best = cost
        return best

    def table(self, kind, ranks, link, concurrent):
        tables = [t for t in self.tables_on(link) if t["kind"] == kind and t["ranks"] == ranks]
        return min(tables, key=lambda t: abs(t.get("concurrent_groups", 1) - concurrent), default=None)

    def tables_on(self, link):
        links = self.cluster.get("links", [])
        name = links[link]["name"] if link < len(links) else None
        return [
            t
            for t in self.cluster.get("collectives", [])
            if t["points"] and (t["link"] == name or (not links and link == 0))
        ]

    def of_group(self, kind, ranks, amount, nodes, fewest, most, concurrent, beyond_pod):
        links = self.cluster.get("links", [])
        link = 1 if nodes > 1 else 0
        table = self.table(kind, ranks, link, concurrent)
        word = "measured"
        if table is None and (nodes == 1 or fewest == most == self.cluster.get("ranks_per_node", 8)):
            word = "fitted"
            key = (kind, ranks, link, concurrent)
            if key not in self.fits:
                points = Fit(self, link, concurrent).points(kind, ranks)
                self.fits[key] = (
                    {"link": links[link]["name"] if link < len(links) else "", "points": points} if points else None
                )
            table = self.fits[key]
        if table is not None:
            source = f"{word} {ranks} ranks {table['link']}"
            if table.get("concurrent_groups", 1) > 1:
                source += f" x{table['concurrent_groups']}"
            if amount > table["points"][-1]["full_tensor_bytes"]:
                source += ", extrapolated"
            loads = loads_of(self.roads(nodes, fewest, most, beyond_pod)[0]) if links else (0, 0)
            return duration_in(table["points"], amount), loads, source
        return self.modelled(kind, ranks, amount, nodes, fewest, most, beyond_pod)

    def roads(self, nodes, fewest, most, beyond_pod):
        """Figures of the links under each protocol: (name, a step inside, a step outside, rate inside, rate outside);
        None: not used."""
        links = self.cluster["links"]
        outer = links[1] if nodes > 1 and len(links) > 1 else None
        inside = outer is None or most > 1
        rate = None
        if outer:
            rate = outer["bytes_per_second"] * fewest
            rate = (
                max(1, nearest(Fraction(rate * outer.get("beyond_pod_rate_ppm", MILLION), MILLION)))
                if beyond_pod
                else rate
            )
        usual = (
            "", links[0].get("latency_ns", 0), outer.get("latency_ns", 0) if outer else 0,
            links[0]["bytes_per_second"] if inside else None, rate,
        )
        roads = [usual]
        for protocol in (outer or links[0]).get("protocols", []):
            of = [
                next((p for p in used.get("protocols", []) if p["name"] == protocol["name"]), None)
                for used in (links[0], outer or links[0])
            ]
            if (inside and of[0] is None) or (outer and of[1] is None):
                continue
            part = [
                None if r is None else max(1, nearest(Fraction(r * p["rate_ppm"], MILLION)))
                for r, p in zip(usual[3:], of, strict=True)
            ]
            roads.append((protocol["name"], of[0]["latency_ns"] if inside else usual[1], of[1]["latency_ns"], *part))
        return roads

    def direct(self, kind, ranks, nodes, fewest, most, beyond_pod):
        """The rates of exchanges and transfers of whole tensors over both links, as roads are written."""
        links = self.cluster["links"]
        outer = links[1] if nodes > 1 else None
        beyond = outer.get("beyond_pod_rate_ppm", MILLION) if outer and beyond_pod else MILLION
        own = max(1, nearest(Fraction(outer["bytes_per_second"] * beyond, MILLION))) if outer else None
        inner_ns, outer_ns = links[0].get("latency_ns", 0), outer.get("latency_ns", 0) if outer else 0
        if kind in ("send", "recv"):
            return "", inner_ns, outer_ns, None if outer else links[0]["bytes_per_second"], own
        inside = up(Fraction(links[0]["bytes_per_second"] * ranks, most - 1)) if most > 1 else None
        return "", inner_ns, outer_ns, inside, up(Fraction(own * ranks, ranks - fewest)) if outer else None

    def modelled(self, kind, ranks, amount, nodes, fewest, most, beyond_pod):
        links = self.cluster["links"]
        if kind in EXCHANGES + TRANSFERS:
            narrow = links[1 if nodes > 1 else 0]
            base = max(used.get("base_latency_ns", 0) for used in links[: 2 if nodes > 1 else 1])
            road = self.direct(kind, ranks, nodes, fewest, most, beyond_pod)
            rate = min(r for r in road[3:] if r is not None)
            steps = (1 - (nodes > 1), int(nodes > 1)) if kind in TRANSFERS else (most - 1, nodes - 1)
            time = steps[0] * road[1] + steps[1] * road[2] + time_at(amount, rate)
            return base + time, loads_of(road), f"alpha-beta {narrow['name']}"
        narrow = links[1 if nodes > 1 else 0]
        base = max(used.get("base_latency_ns", 0) for used in links[: 2 if nodes > 1 else 1])
        algorithms = narrow.get("algorithms", [])
        levels = (nodes - 1).bit_length()
        sent = up(Fraction(amount * (ranks - 1), ranks))
        best = None
        for protocol, inner_ns, outer_ns, inner, outer in self.roads(nodes, fewest, most, beyond_pod):
            rate = min(r for r in (inner, outer) if r is not None)
            twice = 2 if kind == "all_reduce" else 1
            moved = amount if kind in CHAINS else sent
            ways = [("", twice * (inner_ns * (ranks - nodes) + outer_ns * (nodes - 1) + time_at(moved, rate)))]
            part = lambda whole, ppm: max(1, nearest(Fraction(whole * ppm, MILLION)))  # noqa: E731
            if kind == "all_reduce" and "tree" in algorithms:
                ways.append(
                    ("tree", 2 * (inner_ns * (most - 1) + outer_ns * levels + time_at(amount, part(rate, 900_000))))
                )
            if kind in ("all_gather", "reduce_scatter") and nodes > 1 and most == 1 and "pat" in algorithms:
                ways.append(
                    (
                        "pat",
                        nearest(Fraction(outer_ns * levels * 2, 7)) + 2800 * ranks + time_at(sent, part(rate, 750_000)),
                    )
                )
            if kind == "all_reduce" and most > 2 and not protocol and "nvls" in algorithms:
                inside = time_at(
                    amount + up(Fraction(amount, most)), part(inner, links[0].get("nvls_rate_ppm", MILLION))
                )
                outside = 2 * time_at(amount, outer) if outer is not None else 0
                ways.append(("nvls", 2 * (inner_ns + outer_ns * levels) + max(inside, outside)))
            for algorithm, time in ways:
                if best is None or base + time < best[0]:
                    words = " ".join(w for w in ("alpha-beta", narrow["name"], algorithm, protocol) if w)
                    best = (base + time, loads_of((protocol, inner_ns, outer_ns, inner, outer)), words)
        return best


def loads_of(road):
    rate = min(r for r in road[3:] if r is not None)
    return tuple(0 if r is None else max(1, nearest(Fraction(MILLION * rate, r))) for r in road[3:])


class Fit:
    """Tables for numbers of ranks that have none."""

    def __init__(self, costs, link, concurrent):
        self.costs, self.link, self.concurrent = costs, link, concurrent

    def table(self, kind, ranks):
        return self.costs.table(kind, ranks, self.link, self.concurrent)

    def ranks(self, kind, leave_out):
        return sorted({t["ranks"] for t in self.costs.tables_on(self.link) if t["kind"] == kind} - {1, leave_out})

    def bases(self, kind, ranks):
        known = self.ranks(kind, ranks)
        if len(known) <= 1:
            return known
        above = sum(r <= ranks for r in known)
        first = min(max(above, 1), len(known) - 1) - 1
        return known[first : first + 2]

    def at_equal_shards(self, kind, base, ranks, amount):
        return duration_in(self.table(kind, base)["points"], nearest(Fraction(amount * base, ranks)))

    def own(self, kind, ranks, amount):
        if (table := self.table(kind, ranks)) is not None:
            return duration_in(table["points"], amount)
        bases = self.bases(kind, ranks)
        if not bases:
            return None
        times = [self.at_equal_shards(kind, base, ranks, amount) for base in bases]
        if len(bases) == 1:
            return nearest(Fraction(times[0] * (ranks - 1), bases[0] - 1))
        (a, b), (ta, tb) = bases, [nearest(Fraction(t * ranks, base)) for t, base in zip(times, bases, strict=True)]
        return max(ta + nearest(Fraction((tb - ta) * (ranks - a) * b, (b - a) * ranks)), min(ta, tb) // 2)

    def both(self, ranks, amount):
        parts = [self.own(kind, ranks, amount) for kind in ("all_gather", "reduce_scatter")]
        return None if None in parts else sum(parts)

    def at(self, kind, ranks, amount):
        own = self.own(kind, ranks, amount)
        both = self.both(ranks, amount) if kind == "all_reduce" else None
        if not both:
            return own
        known = self.ranks(kind, ranks)
        ratio = {r: Fraction(max(r, ranks), min(r, ranks)) for r in known}
        times = []
        for near in known:
            if ratio[near] != min(ratio.values()):
                continue
            there = self.both(near, nearest(Fraction(amount * near, ranks)))
            if not there:
                return own
            times.append(nearest(Fraction(both * self.at_equal_shards(kind, near, ranks, amount), there)))
        return nearest(Fraction(sum(times), len(times))) if times else own

    def points(self, kind, ranks):
        sizes = {
            nearest(Fraction(p["full_tensor_bytes"] * ranks, base))
            for base in self.bases(kind, ranks)
            for p in self.table(kind, base)["points"]
        }
        points, longest = [], 0
        for size in sorted(s for s in sizes if s <= 1 << 53):
            longest = max(longest, self.at(kind, ranks, size))
            points.append({"full_tensor_bytes": size, "duration_ns": longest})
        return points


def plain(name):
    namespace = "::" if "::" in name else "."
    return name.split(namespace, 1)[-1].split(".", 1)[0]


def class_of(name):
    """The class, by the page of the cluster document: the first that has the whole name, or a part of it."""
    for entry in CLASSES:
        if plain(name) in entry["names"] or any(part in plain(name) for part in entry["parts"]):
            return entry["class"]
    return "elementwise" if name.startswith("aten") else "other"


def on_line(at, low, low_ns, high, high_ns):
    rise = high_ns - low_ns
    if not low <= at <= high:
        rise = max(0, rise)
    start, begin = (high, high_ns) if at > high else (low, low_ns)
    return max(0, begin + nearest(Fraction(rise * (at - start), high - low)))


def around(places, at):
    upper = next((i for i in range(1, len(places)) if places[i] >= at), len(places) - 1)
    return upper - 1, upper


def of_row(row, inner):
    points = [(p["inner"], p["duration_ns"]) for p in row["points"]]
    if len(points) == 1:
        return up(Fraction(points[0][1] * max(inner, points[0][0]), points[0][0]))
    low, high = around([place for place, _ in points], inner)
    return on_line(inner, *points[low], *points[high])


def of_shape(shapes, elements, inner):
    if len(shapes) == 1 or elements <= shapes[0]["output_elements"]:
        return of_row(shapes[0], inner)
    low, high = around([row["output_elements"] for row in shapes], elements)
    ends = [(shapes[i]["output_elements"], of_row(shapes[i], inner)) for i in (low, high)]
    return on_line(elements, *ends[0], *ends[1])


def is_matrix(name):
    return class_of(name) in MATRIX_CLASSES


def efficiency(points, flops):
    if not points:
        return MILLION
    if flops <= points[0]["flops"]:
        return points[0]["efficiency_ppm"]
    if flops >= points[-1]["flops"]:
        return points[-1]["efficiency_ppm"]
    b = next(i for i, p in enumerate(points) if p["flops"] > flops)
    low, high = points[b - 1], points[b]
    rise = high["efficiency_ppm"] - low["efficiency_ppm"]
    return low["efficiency_ppm"] + nearest(
        Fraction(rise * (log(flops) - log(low["flops"])), log(high["flops"]) - log(low["flops"]))
    )


def duration_in(points, amount):
    places, times = [p["full_tensor_bytes"] for p in points], [p["duration_ns"] for p in points]
    if len(points) == 1 or amount <= places[0]:
        return times[0]
    if amount in places:
        return times[places.index(amount)]
    if amount > places[-1]:
        rise = max(0, times[-1] - times[-2])
        return times[-1] + nearest(Fraction(rise * (amount - places[-1]), places[-1] - places[-2]))
    b = next(i for i, place in enumerate(places) if place > amount)
    low, high, low_ns, high_ns = places[b - 1], places[b], times[b - 1], times[b]
    if 0 in (low, high, low_ns, high_ns):
        return low_ns + nearest(Fraction((high_ns - low_ns) * (amount - low), high - low))
    if low_ns == high_ns:
        return low_ns
    slow = nearest(Fraction(low_ns * amount, low))
    fast = max(1, nearest(Fraction(high_ns * amount, high)))
    whole, part = log(high) - log(low), log(amount) - log(low)
    mixed = max(1, nearest(Fraction(fast * (whole - part), whole)) + nearest(Fraction(slow * part, whole)))
    return min(max(nearest(Fraction(slow * fast, mixed)), min(low_ns, high_ns)), max(low_ns, high_ns))


# ---- a step as work ----
class Item:
    """An item that the host issues at one place."""

    def __init__(self, where, kind, phase):
        self.where, self.kind, self.phase = where, kind, phase
        self.host = 0  # issue cost
        self.host_work = 0
        self.stream = None
        self.duration = None  # of work on the stream
        self.work = None  # "compute", "copy", "collective", "to_host", "to_device"
        self.operators = None
        self.record = None  # number of the record that it makes
        self.waits_for = None
        self.unit = None
        self.link = self.group = self.turn = self.source = None
        self.issued = None


def unit_of_segment(document, segment, otherwise):
    reads = [document.at("unit", u) for u in segment.get("reads", [])]
    makes = [document.at("unit", grad["unit"]) for grad in segment.get("grads", [])]
    return (makes or reads or [document.at("unit", segment["unit"]) if "unit" in segment else otherwise])[0]


def parts_of(document, costs, whole, segment, turns, unit_of_record, works):
    """The items of a segment that collectives of the model cut."""
    items = []

    def add(kind, stream, **fields):
        item = Item(whole.where, kind, whole.phase)
        item.stream = stream
        for name, value in fields.items():
            setattr(item, name, value)
        items.append(item)
        return item

    def record(stream):
        unit_of_record.append(None)
        add("record", stream, record=len(unit_of_record) - 1)
        return len(unit_of_record) - 1

    unit, run = unit_of_segment(document, segment, whole.unit), None
    for event in segment["entries"]:
        if event[0] == "wait":
            run = None
            if event[1] in works:
                add("wait", whole.stream, waits_for=works[event[1]])
        elif is_collective(event):
            run, issued = None, event[11]
            group = document.at("communicator", issued["communicator"])
            stream = document.stream_of_model[group]
            add("wait", stream, waits_for=record(whole.stream))
            duration, link, source = costs.of_all(issued["kind"], group, issued["size_bytes"])
            add(
                issued["kind"], stream, work="collective", unit=unit, group=group, link=link, source=source,
                duration=event[7] if event[7] >= 0 else duration, turn=turns[group],
                host=costs.host.get("collective_issue_ns", 0),
            )
            turns[group] += 1
            done = record(stream)
            if issued.get("work", -1) < 0:
                add("wait", whole.stream, waits_for=done)
            else:
                works[issued["work"]] = done
        elif event[0] == "op":
            if run is None:
                issue, in_kernel = costs.issue(segment, on_plain_matrix=False)
                run = add("compute", whole.stream, work="compute", unit=unit, host=issue, operators=[])
            run.operators.append(costs.operator(event) + (in_kernel if event[7] < 0 else 0))
    return items


def lower(document, costs, alive, index):
    """The items of a step in host order, and its phases."""
    items, phases = [], ["forward"]
    inside = ended = False
    last_record, unit_of_record, last_unit, turns = {}, [], {}, collections.Counter()
    works = {}  # of the model: record behind the collective that was issued last under the number

    def enter(phase):
        if phases[-1] != phase:
            phases.append(phase)

    for t, trigger in enumerate(document.plan["steps"][index]["triggers"]):
        kind = trigger["kind"]
        if kind in ("pre_forward", "post_forward") and not inside:
            enter("forward")
        elif kind in ("pre_backward", "post_backward"):
            enter("backward")
            inside, ended = True, False
        elif kind == "backward_end":
            enter("backward")
            inside, ended = False, True
        elif kind in ("optimizer_step", "zero_grad"):
            enter("optimizer")
            inside = False
        passed = Item((t, None), "trigger", len(phases) - 1)
        passed.host = costs.host.get("trigger_ns", 0) if kind in HOOKS else 0
        items.append(passed)
        for i, instruction in enumerate(trigger["instructions"]):
            kind = instruction["kind"]
            if kind == "compute":
                segment = document.plan["segments"][document.ref(instruction, "segment")]
                phase = segment.get("phase", "forward")
                if phase in ("forward", "loss"):
                    inside = False
                    enter("forward")
                elif phase == "backward":
                    enter("backward")
                    inside = inside or not ended
            item = Item((t, i), kind, len(phases) - 1)
            item.unit = document.ref(instruction, "unit")
            item.stream = document.ref(instruction, "stream")
            if kind == "compute" and any(is_collective(e) or e[0] == "wait" for e in segment["entries"]):
                items += parts_of(document, costs, item, segment, turns, unit_of_record, works)
                alive.take(instruction)
                continue
            if kind in ("compute", "orthogonalize"):
                if kind == "orthogonalize":
                    segment = document.plan["segments"][document.ref(instruction, "segment")]
                item.host, in_kernel = costs.issue(segment, kind == "orthogonalize")
                item.operators = [
                    costs.operator(e) + (in_kernel if e[7] < 0 else 0) for e in segment["entries"] if e[0] == "op"
                ]
                item.work, item.unit = "compute", unit_of_segment(document, segment, item.unit)
                if kind == "orthogonalize":
                    exchange = document.plan["exchanges"][document.ref(instruction, "exchange")]
                    item.unit = document.at("unit", exchange["matrices"][instruction["matrix"]]["unit"])
            elif kind in COLLECTIVES:
                item.kind = COLLECTIVES[kind]
                item.host, item.work = costs.host.get("collective_issue_ns", 0), "collective"
                if costs.host.get("runs_kernels"):
                    whole = sum(document.buffers[document.ref(instruction, "src")]["parts_bytes"])
                    item.host += costs.move(2 * whole) * (
                        (kind == "reduce_scatter") + (instruction.get("divisor", 1) != 1)
                    )
                item.group = document.ref(instruction, "communicator")
                item.duration, item.link, item.source = costs.collective(instruction)
                item.turn = turns[item.group]
                turns[item.group] += 1
            elif kind in COPIES:
                view = alive.is_view(instruction)
                item.host = 0 if view else costs.host.get("copy_issue_ns", 0)
                item.work = kind[5:] if kind.startswith("copy_to_") else "copy"
                item.duration = 0 if view else costs.copy(instruction)
                if item.stream is None:
                    item.host_work, item.duration = item.duration, None
            elif kind == "optimizer_step":
                work = costs.optimizer(instruction)
                device, host = work["device"], work["host"]
                issue = costs.host.get("optimizer_issue_ns", 0) or costs.host.get("operator_issue_ns", 0)
                item.host = issue * (device[2] + host[2])
                item.host_work = costs.host_work(sum(host[:2]) + (sum(device[:2]) if item.stream is None else 0))
                if item.stream is not None:
                    item.work, item.duration = "compute", costs.move(sum(device[:2]))
                    if costs.host.get("runs_kernels"):
                        item.duration, item.host = item.duration + item.host, 0
            elif kind in UPDATES:
                read, written, kernels = costs.update(instruction)
                issue = costs.host.get("operator_issue_ns", 0)
                item.host, item.work, item.duration = issue * kernels, "compute", costs.move(read + written)
                if costs.host.get("runs_kernels"):
                    item.duration, item.host = item.duration + item.host, 0
            elif kind == "allocate":
                item.stream = None
                item.host = costs.host.get("allocate_ns", 0) * len(
                    document.buffers[document.ref(instruction, "dst")]["parts_bytes"]
                )
            elif kind in ("record", "wait", "host_wait"):
                item.host = costs.host.get("event_ns", 0)
                event = document.ref(instruction, "event")
                if kind == "record":
                    item.record = last_record[event] = len(unit_of_record)
                    unit_of_record.append(last_unit.get(item.stream))
                else:
                    item.waits_for = last_record.get(event)
                    if item.unit is None and item.waits_for is not None:
                        item.unit = unit_of_record[item.waits_for]
                if kind == "host_wait":
                    item.stream = None
            else:
                item.stream = None
            if item.duration is not None and document.ref(instruction, "unit") is not None:
                last_unit[item.stream] = document.ref(instruction, "unit")
            alive.take(instruction)
            items.append(item)
    return items, phases


# ---- running it ----
class Stuck(Exception):
    pass


class Machine:
    """One step from an idle machine."""

    def __init__(self, document, items, phases, synchronize=False):
        self.cluster = document.cluster
        self.items, self.phases, self.synchronize = items, phases, synchronize
        self.queues = [[item for item in items if item.stream == s] for s in range(len(document.streams))]
        self.heads = [0] * len(self.queues)
        self.places = [0] * len(self.queues)  # how many the host has issued
        self.passed = [[] for _ in self.queues]  # when
        self.active = {}  # stream: [item, what is left, rate]
        self.operator = [0] * len(self.queues)  # next of the segment at the head
        self.began = [None] * len(self.queues)
        self.stood = [None] * len(self.queues)
        self.records, self.turns = {}, collections.Counter()
        self.now = 0
        self.spans = []  # (stream or None, item, start, end)
        self.sums = collections.Counter()
        self.runs_kernels = self.cluster.get("host", {}).get("runs_kernels", False)
        self.phase_end = [0] * len(phases)
        for item in items:
            item.issued = None

    def run(self):
        host = 0
        for i, item in enumerate(self.items):
            if self.synchronize and i > 0 and self.items[i - 1].phase != item.phase:
                self.advance(None)
                host = max(host, self.now)
            host = max(host, self.room_for(item))
            start = host
            host += item.host * (len(item.operators) if item.operators is not None else 1) + item.host_work
            self.sums["host"] += host - start
            self.sums["host_work"] += item.host_work
            item.issued = start if item.operators is not None else host
            if item.kind == "host_wait" and item.waits_for is not None:
                self.advance(item.waits_for)
                if item.waits_for not in self.records:
                    raise Stuck(item.where)
                host = max(host, self.records[item.waits_for])
            if self.runs_kernels and self.holds_host(item):
                here = self.places[item.stream] - 1
                self.advance(None, (item.stream, here))
                if len(self.passed[item.stream]) <= here:
                    raise Stuck(item.where)
                host = max(host, self.passed[item.stream][here])
            if host > start:
                self.spans.append((None, item, start, host))
            if self.phases[item.phase] != "forward":
                self.phase_end[item.phase] = max(self.phase_end[item.phase], host)
        self.advance(None)
        if any(head < len(queue) for head, queue in zip(self.heads, self.queues, strict=True)):
            raise Stuck("a stream")
        self.end = max(host, self.now)
        return self

    @staticmethod
    def holds_host(item):
        return (
            item.work in ("compute", "copy", "to_host", "to_device")
            and item.stream is not None
            or (item.kind == "wait" and item.stream == 0)
        )

    def room_for(self, item):
        """When so much of the item's stream is done that the rest and the item fit into its queue, or all before it."""
        depth = self.cluster.get("host", {}).get("launch_queue_depth", 0)
        if item.stream is None:
            return 0
        queue = self.queues[item.stream]
        first = place = self.places[item.stream]
        self.places[item.stream] += 1
        if self.runs_kernels:
            if item.work is None or place == 0:
                return 0
            if len(self.passed[item.stream]) < place:
                self.advance(None, (item.stream, place - 1))
            if len(self.passed[item.stream]) < place:
                raise Stuck(item.where)
            return self.passed[item.stream][place - 1]
        if not depth:
            return 0
        launches = 0
        while first >= 0:
            launches += 1 if queue[first].operators is None else len(queue[first].operators)
            if launches > depth and first < place:
                break
            first -= 1
        if first < 0:
            return 0
        if len(self.passed[item.stream]) <= first:
            self.advance(None, (item.stream, first))
        return self.passed[item.stream][first]

    def advance(self, record, passed=None):
        """Until the record is reached, or a stream has passed the item of that place; None: until nothing moves."""
        while True:
            while any(self.start(s) for s in range(len(self.queues))):
                pass
            if record is not None and record in self.records:
                return
            if passed is not None and len(self.passed[passed[0]]) > passed[1]:
                return
            rates = {s: self.rate(entry[0]) for s, entry in self.active.items()}
            times = [self.now + up(Fraction(entry[1], rates[s])) for s, entry in self.active.items()]
            times += [at for s in range(len(self.queues)) if s not in self.active and (at := self.wakes(s)) is not None]
            if not times:
                return
            self.account(min(times) - self.now)
            for s, entry in list(self.active.items()):
                entry[1] -= rates[s] * (min(times) - self.now)
            self.now = min(times)
            for s, entry in list(self.active.items()):
                if entry[1] <= 0:
                    del self.active[s]
                    self.finish(s, entry[0])

    def head(self, s):
        return self.queues[s][self.heads[s]] if self.heads[s] < len(self.queues[s]) else None

    def wakes(self, s):
        """When the host lets the head of an idle stream start, if that is what it needs."""
        item = self.head(s)
        if item is None or item.issued is None:
            return None
        at = item.issued
        if item.operators is not None and self.operator[s] < len(item.operators):
            at += (self.operator[s] + 1) * item.host
        return at if at > self.now else None

    def start(self, s):
        """Passes or starts the head of the stream if it can; true when it did."""
        item = self.head(s)
        if item is None or s in self.active or item.issued is None or self.wakes(s) is not None:
            return False
        if item.operators is not None:
            return self.start_operators(s, item)
        if item.kind == "record":
            self.records[item.record] = self.now
        elif item.kind == "wait":
            if item.waits_for is not None and item.waits_for not in self.records:
                if self.stood[s] is None:
                    self.stood[s] = self.now
                return False
            if self.stood[s] is not None and self.stood[s] < self.now:
                self.spans.append((s, item, self.stood[s], self.now))
                if s == 0 and item.unit is not None:
                    self.sums["unit_exposed", item.unit] += self.now - self.stood[s]
            self.stood[s] = None
        else:
            if item.work == "collective" and self.turns[item.group] != item.turn:
                return False
            self.began[s] = self.now
            self.active[s] = [item, item.duration * 60 * MILLION]
            return True
        self.heads[s] += 1
        self.passed[s].append(self.now)
        return True

    def start_operators(self, s, item):
        k, durations = self.operator[s], item.operators
        if k == len(durations):
            if durations:
                self.end_of_work(s, item)
            self.pop(s)
            return True
        if k == 0:
            self.began[s] = self.now
        ahead, at = True, self.now
        for j in range(k, len(durations)):
            ahead = ahead and item.issued + (j + 1) * item.host <= at
            at += durations[j]
        self.operator[s] = len(durations) if ahead else k + 1
        self.active[s] = [item, (sum(durations[k:]) if ahead else durations[k]) * 60 * MILLION]
        return True

    def pop(self, s):
        self.heads[s] += 1
        self.passed[s].append(self.now)
        self.operator[s] = 0

    def finish(self, s, item):
        if item.operators is not None:
            return  # the rest of the segment, or its end
        if item.work == "collective":
            self.turns[item.group] += 1
        self.end_of_work(s, item)
        self.pop(s)

    def end_of_work(self, s, item):
        self.spans.append((s, item, self.began[s], self.now))
        self.sums["operations", s] += 1
        phase = self.phases[item.phase]
        if phase != "forward" or item.work == "compute":
            self.phase_end[item.phase] = max(self.phase_end[item.phase], self.now)
        if item.operators is not None and item.unit is not None:
            self.sums["unit_forward" if phase == "forward" else "unit_backward", item.unit] += self.now - self.began[s]

    def works(self, *kinds):
        return [entry[0] for entry in self.active.values() if entry[0].work in kinds]

    def rate(self, item):
        kernels, collectives = self.works("compute", "copy"), self.works("collective")
        if item.work in ("compute", "copy"):
            ppm = self.cluster.get("compute_rate_while_communicating_ppm", MILLION) if collectives else MILLION
            return ppm * 60 // len(kernels)
        if item.work == "collective":
            ppm = self.cluster.get("communication_rate_while_computing_ppm", MILLION) if kernels else MILLION
            return min(self.share(ppm, link, item.link[link], collectives) for link in (0, 1))
        return 60 * MILLION // len(self.works(item.work))

    def share(self, ppm, link, load, collectives):
        """The rate that one link lets a collective have: those that need least of it first, then equal shares."""
        if load == 0 or len(collectives) == 1:
            return ppm * 60
        left, waiting = MILLION, sorted(other.link[link] for other in collectives if other.link[link] > 0)
        while waiting and waiting[0] * len(waiting) <= left:
            if waiting[0] >= load:
                return ppm * 60
            left -= waiting.pop(0)
        return ppm * 60 * left // (len(waiting) * load)

    def activity(self):
        """The device's activity now: the model before copies, copies before collectives, these before the host's
        link."""
        doing = []
        for item in self.works("compute"):
            doing.append(
                ("0123"["forward backward optimizer".split().index(self.phases[item.phase])], self.phases[item.phase])
            )
        doing += [("4", "copies") for _ in self.works("copy")]
        names = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "other_collective"]
        for item in self.works("collective"):
            name = "send_recv" if item.kind in TRANSFERS else item.kind if item.kind in names else names[-1]
            doing.append((f"5{names.index(name)}", name))
        doing += [
            ("6", "host_link")
            for entry in self.active.values()
            if entry[0].work not in ("compute", "copy", "collective")
        ]
        return min(doing)[1] if doing else "idle"

    def account(self, elapsed):
        self.sums["activity", self.activity()] += elapsed
        computes, collectives = self.works("compute"), self.works("collective")
        if computes:
            self.sums["compute"] += elapsed
        if collectives:
            self.sums["communication"] += elapsed
            if not computes:
                self.sums["exposed"] += elapsed
        for s, entry in self.active.items():
            self.sums["busy", s] += elapsed
            item = entry[0]
            if item.work == "collective":
                key = (item.kind, item.group, item.source)
                self.sums["busy", key] += elapsed
                self.sums["exposed", key] += 0 if computes else elapsed

    def times_of_phases(self):
        sums, begin = collections.Counter(), 0
        for p, phase in enumerate(self.phases):
            end = self.end if p + 1 == len(self.phases) else max(begin, self.phase_end[p])
            sums[phase] += end - begin
            begin = end
        return sums


def simulate(document):
    """(machines of all steps, times of the last step's phases, each alone)"""
    costs, alive = Costs(document), Alive(document)
    machines = []
    for index in range(len(document.plan["steps"])):
        items, phases = lower(document, costs, alive, index)
        machines.append(Machine(document, items, phases).run())
    return machines, Machine(document, items, phases, synchronize=True).run().times_of_phases()
