"""Optimizer steps whose inputs any machine can make again, and a script that writes down what a device made of them.

    python tests/optim/cuda_cases.py OUT [--device cuda|cpu]

needs torch and numpy only. It writes OUT/meta.json (versions, device), OUT/ops.npz (single operations), OUT/pow.npz
(powers of the betas) and OUT/optimizers.npz (whole steps of torch's optimizers: the first 1,024 elements of every
tensor after the first and the last step, and a CRC-32 of every whole tensor after every step). All inputs are bit
patterns from integer arithmetic, so none of them is stored.

    python tests/optim/cuda_cases.py OUT --condense FILE.npz

keeps of these what the tests need: the CRCs, and the powers of the steps that are made.
"""

import argparse
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

SHAPES = (4096, 1023, 5, 1)  # whole vectors; not a multiple of four; less than one vector
STEPS = 12
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def bits(seed: int, count: int) -> np.ndarray:
    """`count` 64-bit patterns: a Weyl sequence, mixed; the same on every machine."""
    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed * 1000003)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((29, 0xD6E8FEB86659FD93), (32, 0xA0761D6478BD642F)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))


def floats(seed: int, count: int, low: int, high: int) -> np.ndarray:
    """float32: sign and mantissa at random, powers of two from `low` to `high`."""
    x = bits(seed, count)
    exponent = (np.uint64(127 + low) + (x >> np.uint64(40)) % np.uint64(high - low + 1)) << np.uint64(23)
    sign = (x >> np.uint64(63)) << np.uint64(31)
    return (sign | exponent | (x & np.uint64(0x7FFFFF))).astype(np.uint32).view(np.float32)


def parameters(seed: int, count: int) -> np.ndarray:
    """Starting values from 2^-12 to 2, with zeros of both signs among them."""
    values = floats(seed, count, -12, 0)
    values[3::97] = 0.0
    values[5::101] = -0.0
    return values


def gradients(seed: int, count: int, hard: bool) -> np.ndarray:
    """Gradients from 2^-24 to 4; `hard` ones also hold zeros, denormals, vanishing squares and large numbers."""
    values = floats(seed, count, -24, 1)
    if hard:
        values[0::37] = 0.0
        values[1::41] = -0.0
        values[2::43] = floats(seed + 1, values[2::43].size, -75, -62)
        values[4::47] = (bits(seed + 2, values[4::47].size) & np.uint64(0x007FFFFF)).astype(np.uint32).view(np.float32)
        values[6::53] = floats(seed + 3, values[6::53].size, 20, 60)
    return values


@dataclass(frozen=True)
class Case:
    """One run of one optimizer: `STEPS` steps over parameters of `SHAPES` (`misaligned`: each one element off)."""

    kind: str
    implementation: str
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lr: float = 1e-3
    decay_lr: float = 0.9  # the rate of step s (from 0) is lr * decay_lr ** s
    first_step: int = 0  # steps already done, as the state counts them
    dtype: str = "float32"
    hard: bool = True
    misaligned: bool = False
    capturable: bool = False
    tensor_lr: bool = False
    grad_scale: float = 0.0  # fused only: gradients are divided by it in the kernel
    skipped: tuple[int, ...] = ()  # fused only: steps (from 0) at which found_inf is set

    @property
    def name(self) -> str:
        """A name of the fields that differ from their defaults."""
        default = Case(self.kind, self.implementation)
        parts = [
            f"{k}={v}"
            for k, v in asdict(self).items()
            if k not in ("kind", "implementation") and v != getattr(default, k)
        ]
        return " ".join([self.kind, self.implementation, *parts]).replace("/", "_")

    def parameters(self) -> list[np.ndarray]:
        """Starting values, float32 (rounded to `dtype` by whoever runs the case)."""
        return [parameters(11 + i, n) for i, n in enumerate(SHAPES)]

    def gradients(self, step: int) -> list[np.ndarray]:
        """Gradients of step `step` (from 0), float32; scaled up by a power of two where the kernel divides."""
        return [gradients(1000 + 50 * step + 7 * i, n, self.hard) for i, n in enumerate(SHAPES)]

    def rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        return self.lr * self.decay_lr**step


def cases() -> list[Case]:
    """What is run: small enough for seconds, wide enough to tell operation orders apart."""
    found = []
    for kind in ("adam", "adamw"):
        for implementation in ("foreach", "fused", "single"):
            for weight_decay in (0.0, 0.05):
                found.append(Case(kind, implementation, weight_decay))
                found.append(Case(kind, implementation, weight_decay, misaligned=True, hard=False))
            found.append(Case(kind, implementation, 0.01, amsgrad=True))
            found.append(Case(kind, implementation, 0.01, maximize=True))
            found.append(Case(kind, implementation, 0.01, amsgrad=True, maximize=True, misaligned=True))
            found.append(Case(kind, implementation, 0.1, betas=(0.95, 0.98), eps=1e-6, lr=3e-4, decay_lr=1.0))
            found.append(Case(kind, implementation, 0.1, betas=(0.5, 0.99), eps=1e-10, lr=0.1))
            found.append(Case(kind, implementation, 0.01, betas=(0.3, 0.7), lr=0.01))  # lerp's other branch
            found.append(Case(kind, implementation, 0.01, first_step=1000, hard=False))
            found.append(Case(kind, implementation, 0.01, first_step=30000, hard=False))
            for dtype in ("bfloat16", "float16", "float64"):
                found.append(Case(kind, implementation, 0.01, dtype=dtype, hard=False))
                found.append(Case(kind, implementation, 0.01, dtype=dtype, amsgrad=True, misaligned=True, hard=False))
        found.append(Case(kind, "fused", 0.01, tensor_lr=True))
        found.append(Case(kind, "fused", 0.01, grad_scale=1024.0))
        found.append(Case(kind, "fused", 0.01, grad_scale=3.0, skipped=(2, 5), hard=False))
        found.append(Case(kind, "foreach", 0.01, capturable=True))
        found.append(Case(kind, "single", 0.01, capturable=True))
    for implementation in ("foreach", "fused", "single"):
        found.append(Case("sgd", implementation, lr=0.1))
        found.append(Case("sgd", implementation, 0.05, lr=0.1, misaligned=True))
        found.append(Case("sgd", implementation, 0.05, momentum=0.9, lr=0.1))
        found.append(Case("sgd", implementation, 0.05, momentum=0.9, dampening=0.3, lr=0.1))
        found.append(Case("sgd", implementation, 0.05, momentum=0.9, nesterov=True, maximize=True, lr=0.1))
        for dtype in ("bfloat16", "float16", "float64"):
            found.append(Case("sgd", implementation, 0.01, momentum=0.9, lr=0.1, dtype=dtype, hard=False))
    found.append(Case("sgd", "fused", 0.05, momentum=0.9, lr=0.1, grad_scale=3.0, skipped=(2,), hard=False))
    return found


def make_optimizer(case: Case, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """torch's optimizer of this case over `weights`."""
    variant = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "single": {"foreach": False, "fused": False},
    }[case.implementation]
    lr = torch.tensor(case.lr, device=weights[0].device) if case.tensor_lr else case.lr
    if case.kind == "sgd":
        return torch.optim.SGD(
            weights,
            lr=lr,
            momentum=case.momentum,
            dampening=case.dampening,
            nesterov=case.nesterov,
            weight_decay=case.weight_decay,
            maximize=case.maximize,
            **variant,
        )
    adam = torch.optim.Adam if case.kind == "adam" else torch.optim.AdamW
    return adam(
        weights,
        lr=lr,
        betas=case.betas,
        eps=case.eps,
        weight_decay=case.weight_decay,
        amsgrad=case.amsgrad,
        maximize=case.maximize,
        capturable=case.capturable,
        **variant,
    )


def placed(values: np.ndarray, dtype: torch.dtype, device: str, misaligned: bool) -> torch.Tensor:
    """A tensor of these values; `misaligned` puts it one element behind an aligned address."""
    room = torch.zeros(values.size + 1, dtype=dtype, device=device)
    view = room[1:] if misaligned else room[:-1]
    view.copy_(torch.from_numpy(values.copy()))
    return view


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits, as integers of its width."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(whole).cpu().numpy().copy()


def run_case(case: Case, device: str) -> dict[str, np.ndarray]:
    """The start of every tensor after the first and the last step, and CRCs of all tensors after all steps."""
    dtype = DTYPES[case.dtype]
    weights = [placed(v, dtype, device, case.misaligned).requires_grad_() for v in case.parameters()]
    optimizer = make_optimizer(case, weights)
    if case.first_step:
        # The state as it would be after so many steps: moments from the generator, the counter as torch keeps it.
        optimizer.param_groups[0]["lr"] = 0.0
        for w in weights:
            w.grad = torch.zeros_like(w)
        before = [w.detach().clone() for w in weights]
        optimizer.step()
        for i, (w, old) in enumerate(zip(weights, before, strict=True)):
            state = optimizer.state[w]
            w.data.copy_(old)
            state["step"].fill_(float(case.first_step))
            state["exp_avg"].copy_(torch.from_numpy(floats(500 + i, w.numel(), -12, -2)))
            state["exp_avg_sq"].copy_(torch.from_numpy(np.abs(floats(600 + i, w.numel(), -24, -4))))
    kept: dict[str, np.ndarray] = {}
    sums = []
    for step in range(STEPS):
        rate = case.rate(step)
        group = optimizer.param_groups[0]
        if case.tensor_lr:
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        for w, g in zip(weights, case.gradients(step), strict=True):
            w.grad = placed(g, dtype, device, case.misaligned)
        if case.grad_scale:
            optimizer.grad_scale = torch.full((), case.grad_scale, device=device)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.full((), float(step in case.skipped), device=device)  # type: ignore[attr-defined]
        optimizer.step()
        row = []
        for i, w in enumerate(weights):
            tensors = {"param": w, **{k: v for k, v in optimizer.state[w].items() if isinstance(v, torch.Tensor)}}
            for key in sorted(tensors):
                value = raw(tensors[key])
                row.append(zlib.crc32(value.tobytes()))
                if step in (0, STEPS - 1):
                    kept[f"{step}/{i}/{key}"] = value.reshape(-1)[:1024]
        sums.append(row)
    kept["crc32"] = np.array(sums, dtype=np.uint32)
    return kept


def run_operations(device: str) -> dict[str, np.ndarray]:
    """The operations that the optimizers are made of, each alone, for single tensors and for lists."""
    n = 8190
    a, b = (placed(floats(s, n, -30, 10), torch.float32, device, False) for s in (1, 2))
    c = placed(np.abs(floats(3, n, -30, 10)), torch.float32, device, False)
    near = placed(floats(1, n, -3, 0), torch.float32, device, False)
    tiny = placed(floats(4, n, -126, -100), torch.float32, device, False)
    scalar = torch.tensor(0.3, device=device)

    def each(name: str, x: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        lists = [x.clone()], *([o] if isinstance(o, torch.Tensor) and o.dim() else o for o in others)
        getattr(torch, f"_foreach_{name}_")(*lists, **more)
        return lists[0][0]

    found = {
        "sqrt": c.sqrt(),
        "foreach_sqrt": each("sqrt", c),
        "sqrt_tiny": tiny.abs().sqrt(),
        "div": a / c,
        "div_tiny": tiny / c,
        "div_scalar": a / 0.03162277660168379,
        "foreach_div_scalar": each("div", a, 0.03162277660168379),
        "foreach_div_scalarlist": each("div", a, [0.03162277660168379]),
        "add_alpha": a.add(b, alpha=0.05),
        "foreach_add_alpha": each("add", a, b, alpha=0.05),
        "add_scalar": c.add(1e-8),
        "foreach_add_scalar": each("add", c, 1e-8),
        "mul_scalar": a.mul(0.999),
        "foreach_mul_scalar": each("mul", a, 0.999),
        "foreach_mul_tensor": each("mul", a, scalar),
        "mul_tensor": a.mul(scalar),
        "maximum": torch.maximum(a, b),
        "foreach_maximum": each("maximum", a, b),
    }
    for weight in (0.1, 0.05, 0.5, 0.7):
        found[f"lerp_{weight}"] = a.lerp(b, weight)
        found[f"foreach_lerp_{weight}"] = each("lerp", a, b, weight)
        found[f"lerp_near_{weight}"] = near.lerp(b, weight)
    for value in (1.0, 0.001, -0.0316, 0.3):
        found[f"addcmul_{value}"] = a.addcmul(b, b, value=value)
        found[f"foreach_addcmul_{value}"] = each("addcmul", a, b, b, value)
        found[f"foreach_addcmul_list_{value}"] = each("addcmul", a, b, b, [value])
        found[f"addcmul_bc_{value}"] = a.addcmul(b, c, value=value)
        found[f"addcdiv_{value}"] = a.addcdiv(b, c, value=value)
        found[f"foreach_addcdiv_{value}"] = each("addcdiv", a, b, c, value)
        found[f"foreach_addcdiv_list_{value}"] = each("addcdiv", a, b, c, [value])
    scaled = [a.clone()]
    torch._amp_foreach_non_finite_check_and_unscale_(
        scaled, torch.zeros((), device=device), torch.tensor(1 / 3, device=device)
    )
    found["unscale"] = scaled[0]
    for tensors in ([a], [a, b], [a, b[:1000], near[:3]]):
        key = "_".join(str(t.numel()) for t in tensors)
        copies = [t.detach().clone().requires_grad_() for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.grad = tensor.detach().clone()
        found[f"norm_{key}"] = torch.nn.utils.clip_grad_norm_(copies, 1.0)
        found[f"clipped_{key}"] = copies[0].grad
        found[f"norms_{key}"] = torch.stack(torch._foreach_norm(tensors))
    return {key: raw(value) for key, value in found.items()}


def run_powers(device: str) -> dict[str, np.ndarray]:
    """beta ** step on the device, and what fused kernels make of it: one element each, all at other step counts."""
    found = {}
    for beta in (0.3, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999):
        for dtype in (torch.float32, torch.float64):
            count = torch.arange(1, 2049, dtype=dtype, device=device)
            base = torch.full_like(count, beta)
            found[f"{beta} {dtype}".replace("torch.", "")] = raw(torch.pow(base, count))
    for beta1, beta2 in ((0.9, 0.999), (0.95, 0.98)):
        count = 1024
        weights = [torch.zeros(1, device=device, requires_grad=True) for _ in range(count)]
        optimizer = torch.optim.Adam(weights, lr=0.01, betas=(beta1, beta2), eps=1e-8, fused=True)
        for i, w in enumerate(weights):
            w.grad = torch.full_like(w, 0.37)
            optimizer.state[w] = {
                "step": torch.tensor(float(i), device=device),
                "exp_avg": torch.full_like(w, 0.11),
                "exp_avg_sq": torch.full_like(w, 0.013),
            }
        optimizer.step()
        found[f"fused {beta1} {beta2}"] = raw(torch.cat([w.detach() for w in weights]))
    return found


def condense(out: Path, file: Path) -> None:
    """The tests' file: `crc32/CASE`, `pow/BETA DTYPE` (steps 1 to 12, then 1001 to 1012) and `meta`."""
    whole, powers = np.load(out / "optimizers.npz"), np.load(out / "pow.npz")
    kept = {f"crc32/{name.removesuffix('/crc32')}": whole[name] for name in whole.files if name.endswith("/crc32")}
    for name in powers.files:
        if not name.startswith("fused"):
            kept[f"pow/{name}"] = np.concatenate([powers[name][:STEPS], powers[name][1000 : 1000 + STEPS]])
    meta = json.loads((out / "meta.json").read_text())
    kept["meta"] = np.array(json.dumps({key: meta[key] for key in ("torch", "cuda", "name", "capability")}))
    np.savez_compressed(file, **kept)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--condense", type=Path, metavar="FILE", help="make the tests' file of what lies in OUT")
    options = parser.parse_args()
    if options.condense:
        condense(options.out, options.condense)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    meta = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": options.device, "failed": {}}
    if options.device == "cuda":
        meta["name"] = torch.cuda.get_device_name()
        meta["capability"] = list(torch.cuda.get_device_capability())
    np.savez_compressed(options.out / "ops.npz", **run_operations(options.device))
    np.savez_compressed(options.out / "pow.npz", **run_powers(options.device))
    found: dict[str, np.ndarray] = {}
    for case in cases():
        try:
            found |= {f"{case.name}/{key}": value for key, value in run_case(case, options.device).items()}
        except (RuntimeError, ValueError, AssertionError) as error:
            meta["failed"][case.name] = f"{type(error).__name__}: {error}"[:300]
    meta["cases"] = len(cases())
    np.savez_compressed(options.out / "optimizers.npz", **found)
    (options.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(json.dumps(meta, indent=2))


if __name__ == "__main__":
    main()
