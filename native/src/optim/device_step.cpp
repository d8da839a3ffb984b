#include "optim/device_step.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "optim/arithmetic.hpp"
#include "optim/steps.hpp"

namespace lastgood {
namespace {

constexpr std::size_t kBlock = 128;     // elements between the loops over them; with few, a CPU reads the next block meanwhile

struct Float32 {
    using Real = float;
    using Stored = float;
    static LASTGOOD_INLINE float load(float x) { return x; }
    static LASTGOOD_INLINE float store(float x) { return x; }
};

struct Float64 {
    using Real = double;
    using Stored = double;
    static LASTGOOD_INLINE double load(double x) { return x; }
    static LASTGOOD_INLINE double store(double x) { return x; }
};

struct Bfloat16 {
    using Real = float;
    using Stored = std::uint16_t;
    static LASTGOOD_INLINE float load(std::uint16_t x) {
        const std::uint32_t bits = std::uint32_t(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static LASTGOOD_INLINE std::uint16_t store(float x) {
        std::uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const std::uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return (bits & 0x7FFFFFFFu) > 0x7F800000u ? std::uint16_t(0x7FFF) : std::uint16_t(nearest);
    }
};

// A block of elements on its way through a step.
template <class Type>
struct Block {
    using Real = typename Type::Real;
    alignas(64) Real parameter[kBlock];
    alignas(64) Real gradient[kBlock];
    alignas(64) Real first[kBlock];
    alignas(64) Real second[kBlock];
    alignas(64) Real largest[kBlock];
};

template <class Type>
LASTGOOD_INLINE void load(typename Type::Real* to, std::uintptr_t address, std::uint64_t at, std::size_t count) {
    const auto* from = reinterpret_cast<const typename Type::Stored*>(address) + at;
    for (std::size_t i = 0; i < count; ++i) to[i] = Type::load(from[i]);
}

template <class Type>
LASTGOOD_INLINE void store(std::uintptr_t address, std::uint64_t at, const typename Type::Real* from, std::size_t count) {
    auto* to = reinterpret_cast<typename Type::Stored*>(address) + at;
    for (std::size_t i = 0; i < count; ++i) to[i] = Type::store(from[i]);
}

// Rounds to the parameter's type between two kernels.
template <class Type>
LASTGOOD_INLINE typename Type::Real between(typename Type::Real x) {
    return Type::load(Type::store(x));
}

// The gradient as the step sees it: unscaled, clipped, with its sign.
template <class Type>
LASTGOOD_INLINE void prepare(const DeviceStep& step, typename Type::Real* gradient, std::size_t count) {
    using Real = typename Type::Real;
    for (const double wide : step.factors) {
        const Real factor = Real(wide);
        for (std::size_t i = 0; i < count; ++i) gradient[i] = between<Type>(gradient[i] * factor);
    }
    if (step.limit >= 0) {
        const Real limit = between<Type>(Real(step.limit));
        for (std::size_t i = 0; i < count; ++i) {
            // Written so that what is no number stays none.
            const Real raised = gradient[i] < -limit ? -limit : gradient[i];
            gradient[i] = raised > limit ? limit : raised;
        }
    }
    if (step.divisor != 0) {
        const Real divisor = Real(float(step.divisor));
        for (std::size_t i = 0; i < count; ++i) gradient[i] = gradient[i] / divisor;
    }
    if (step.maximize)
        for (std::size_t i = 0; i < count; ++i) gradient[i] = -gradient[i];
}

// Whether the element is contracted in the one place where compilers differ: a thread holds four neighbours where tensors
// are aligned, and elements 512 apart elsewhere. `at` is a multiple of kBlock.
LASTGOOD_INLINE bool contracted(unsigned lanes, bool vectors, std::uint64_t at, std::size_t i) {
    const unsigned lane = vectors ? unsigned(i & 3) : unsigned((at + i) / 512 & 3);
    return (vectors ? lanes : lanes >> 4) >> lane & 1u;
}

// a * b + c, where the lanes say so in one rounding.
template <class Real>
LASTGOOD_INLINE void multiply_add(Real a, const Real* b, const Real* c, Real* to, std::size_t count, unsigned lanes,
                                  bool vectors, std::uint64_t at) {
    if ((vectors ? lanes : lanes >> 4) % 16 == 15) {
        for (std::size_t i = 0; i < count; ++i) to[i] = fused(a, b[i], c[i]);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Real separate = a * b[i] + c[i];
        const Real once = fused(a, b[i], c[i]);
        to[i] = contracted(lanes, vectors, at, i) ? once : separate;
    }
}

template <class Type>
LASTGOOD_INLINE void adam_by_kernels(const DeviceStep& step, const DeviceTensor& tensor, Block<Type>& block,
                                     std::size_t count) {
    using Real = typename Type::Real;
    if (step.decay == DeviceDecay::decoupled) {
        const Real factor = Real(1 - step.lr * step.weight_decay);
        for (std::size_t i = 0; i < count; ++i) block.parameter[i] = between<Type>(block.parameter[i] * factor);
    } else if (step.decay == DeviceDecay::l2) {
        const Real factor = Real(step.weight_decay);
        for (std::size_t i = 0; i < count; ++i)
            block.gradient[i] = between<Type>(fused(factor, block.parameter[i], block.gradient[i]));
    }
    const Real weight = Real(1 - step.beta1);
    const Real rest = Real(1) - weight;
    if (std::fabs(weight) < Real(0.5)) {
        for (std::size_t i = 0; i < count; ++i)
            block.first[i] = between<Type>(fused(weight, block.gradient[i] - block.first[i], block.first[i]));
    } else {
        for (std::size_t i = 0; i < count; ++i)
            block.first[i] = between<Type>(fused(-(block.gradient[i] - block.first[i]), rest, block.gradient[i]));
    }
    const Real kept = Real(step.beta2);
    const Real added = Real(1 - step.beta2);
    for (std::size_t i = 0; i < count; ++i) {
        const Real second = between<Type>(block.second[i] * kept);
        block.second[i] = between<Type>(fused(added, block.gradient[i] * block.gradient[i], second));
    }
    const Real* squares = block.second;
    if (tensor.largest != 0) {
        for (std::size_t i = 0; i < count; ++i) {
            const Real second = block.second[i];
            block.largest[i] = block.largest[i] < second || second != second ? second : block.largest[i];
        }
        squares = block.largest;
    }
    const Real eps = Real(step.eps);
    const Real step_size = Real(tensor.step_size);
    const bool divides = step.family == DeviceFamily::foreach;
    const Real correction = divides ? Real(tensor.correction) : Real(1 / tensor.correction);
    for (std::size_t i = 0; i < count; ++i) {
        const Real deviation = between<Type>(root(squares[i]));
        const Real corrected = between<Type>(divides ? deviation / correction : deviation * correction);
        const Real denominator = between<Type>(corrected + eps);
        block.parameter[i] = fused(step_size, block.first[i] / denominator, block.parameter[i]);
    }
}

template <class Type>
LASTGOOD_INLINE void adam_in_one(const DeviceStep& step, const DeviceTensor& tensor, Block<Type>& block,
                                 std::uint64_t at, std::size_t count) {
    using Real = typename Type::Real;
    const Real weight_decay = Real(step.weight_decay);
    if (step.decay == DeviceDecay::decoupled) {
        const Real factor = -(Real(step.lr) * weight_decay);
        for (std::size_t i = 0; i < count; ++i)
            block.parameter[i] = fused(factor, block.parameter[i], block.parameter[i]);
    } else if (step.decay == DeviceDecay::l2) {
        const bool vectors = tensor.aligned && tensor.count % 4 == 0;
        multiply_add(weight_decay, block.parameter, block.gradient, block.gradient, count, step.lanes, vectors, at);
    }
    const Real beta1 = Real(step.beta1);
    const Real beta2 = Real(step.beta2);
    for (std::size_t i = 0; i < count; ++i) {
        const Real gradient = block.gradient[i];
        const Real square = gradient * gradient;
        block.first[i] = fused(beta1, block.first[i], fused(-beta1, gradient, gradient));
        block.second[i] = fused(beta2, block.second[i], fused(-beta2, square, square));
    }
    const Real* squares = block.second;
    if (tensor.largest != 0) {
        for (std::size_t i = 0; i < count; ++i)
            block.largest[i] = block.largest[i] < block.second[i] ? block.second[i] : block.largest[i];
        squares = block.largest;
    }
    const Real eps = Real(step.eps);
    const Real step_size = Real(tensor.step_size);
    const Real correction = Real(tensor.correction);
    for (std::size_t i = 0; i < count; ++i) {
        const Real denominator = root(squares[i]) / correction + eps;
        block.parameter[i] = block.parameter[i] - step_size * block.first[i] / denominator;
    }
}

template <class Type, bool Fused>
LASTGOOD_INLINE void sgd(const DeviceStep& step, const DeviceTensor& tensor, Block<Type>& block, std::uint64_t at,
                         std::size_t count) {
    using Real = typename Type::Real;
    if (step.decay == DeviceDecay::l2) {
        const Real factor = Real(step.weight_decay);
        for (std::size_t i = 0; i < count; ++i) {
            const Real decayed = fused(factor, block.parameter[i], block.gradient[i]);
            block.gradient[i] = Fused ? decayed : between<Type>(decayed);
        }
    }
    const Real* direction = block.gradient;
    if (tensor.first != 0) {
        const Real momentum = Real(step.momentum);
        const Real added = Real(1 - step.dampening);
        if (tensor.fresh) {
            for (std::size_t i = 0; i < count; ++i) block.first[i] = block.gradient[i];
        } else {
            for (std::size_t i = 0; i < count; ++i) {
                const Real slowed = block.first[i] * momentum;
                const Real moved = fused(added, block.gradient[i], Fused ? slowed : between<Type>(slowed));
                block.first[i] = Fused ? moved : between<Type>(moved);
            }
        }
        if (step.nesterov) {
            for (std::size_t i = 0; i < count; ++i) {
                const Real ahead = fused(momentum, block.first[i], block.gradient[i]);
                block.gradient[i] = Fused ? ahead : between<Type>(ahead);
            }
        } else {
            direction = block.first;
        }
    }
    const bool vectors = tensor.aligned && tensor.count % 4 == 0;
    multiply_add(Real(-step.lr), direction, block.parameter, block.parameter, count, step.lanes, vectors, at);
}

// Elements [begin, end) of one tensor; `begin` is a multiple of kBlock.
template <class Type>
LASTGOOD_INLINE void run(const DeviceStep& step, const DeviceTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    Block<Type> block;
    for (std::uint64_t at = begin; at < end; at += kBlock) {
        const std::size_t count = std::size_t(std::min<std::uint64_t>(kBlock, end - at));
        load<Type>(block.parameter, tensor.parameter, at, count);
        load<Type>(block.gradient, tensor.gradient, at, count);
        prepare<Type>(step, block.gradient, count);
        if (tensor.first != 0 && !tensor.fresh) load<Type>(block.first, tensor.first, at, count);
        if (step.adam) {
            load<Type>(block.second, tensor.second, at, count);
            if (tensor.largest != 0) load<Type>(block.largest, tensor.largest, at, count);
            if (step.family == DeviceFamily::fused)
                adam_in_one<Type>(step, tensor, block, at, count);
            else
                adam_by_kernels<Type>(step, tensor, block, count);
            store<Type>(tensor.second, at, block.second, count);
            if (tensor.largest != 0) store<Type>(tensor.largest, at, block.largest, count);
        } else if (step.family == DeviceFamily::fused) {
            sgd<Type, true>(step, tensor, block, at, count);
        } else {
            sgd<Type, false>(step, tensor, block, at, count);
        }
        if (tensor.first != 0) store<Type>(tensor.first, at, block.first, count);
        store<Type>(tensor.parameter, at, block.parameter, count);
    }
}

// The whole of `adam_in_one` for an element at a time, where nothing is rounded between and the lanes are alike: a compiler
// keeps all of it in registers, and the step comes near the speed of memory.
template <class Real, DeviceDecay Decay, bool Amsgrad, bool Divides>
LASTGOOD_INLINE void adam_in_one_pass(const DeviceStep& step, const DeviceTensor& tensor, std::uint64_t begin,
                                      std::uint64_t end) {
    const std::size_t count = std::size_t(end - begin);
    Real* __restrict parameters = reinterpret_cast<Real*>(tensor.parameter) + begin;
    const Real* __restrict gradients = reinterpret_cast<const Real*>(tensor.gradient) + begin;
    Real* __restrict firsts = reinterpret_cast<Real*>(tensor.first) + begin;
    Real* __restrict seconds = reinterpret_cast<Real*>(tensor.second) + begin;
    Real* __restrict largests = Amsgrad ? reinterpret_cast<Real*>(tensor.largest) + begin : nullptr;
    const auto factor = [&](std::size_t i) { return i < step.factors.size() ? Real(step.factors[i]) : Real(1); };
    const Real factor1 = factor(0), factor2 = factor(1);
    const Real limit = step.limit >= 0 ? Real(step.limit) : std::numeric_limits<Real>::infinity();
    const Real divisor = Real(float(step.divisor)), sign = step.maximize ? Real(-1) : Real(1);
    const Real decay = Real(step.weight_decay), kept = -(Real(step.lr) * decay);
    const Real beta1 = Real(step.beta1), beta2 = Real(step.beta2), eps = Real(step.eps);
    const Real step_size = Real(tensor.step_size), correction = Real(tensor.correction);
    for (std::size_t i = 0; i < count; ++i) {
        Real gradient = gradients[i] * factor1 * factor2;
        gradient = gradient < -limit ? -limit : gradient;
        gradient = gradient > limit ? limit : gradient;
        if (Divides) gradient = gradient / divisor;
        gradient = gradient * sign;
        Real parameter = parameters[i];
        if (Decay == DeviceDecay::decoupled) parameter = fused(kept, parameter, parameter);
        if (Decay == DeviceDecay::l2) gradient = fused(decay, parameter, gradient);
        const Real square = gradient * gradient;
        const Real first = fused(beta1, firsts[i], fused(-beta1, gradient, gradient));
        const Real second = fused(beta2, seconds[i], fused(-beta2, square, square));
        firsts[i] = first;
        seconds[i] = second;
        Real squares = second;
        if (Amsgrad) {
            squares = largests[i] < second ? second : largests[i];
            largests[i] = squares;
        }
        parameters[i] = parameter - step_size * first / (root(squares) / correction + eps);
    }
}

template <class Real, DeviceDecay Decay>
LASTGOOD_INLINE void run_pass(const DeviceStep& step, const DeviceTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    const bool amsgrad = tensor.largest != 0, divides = step.divisor != 0;
    if (amsgrad && divides) return adam_in_one_pass<Real, Decay, true, true>(step, tensor, begin, end);
    if (amsgrad) return adam_in_one_pass<Real, Decay, true, false>(step, tensor, begin, end);
    if (divides) return adam_in_one_pass<Real, Decay, false, true>(step, tensor, begin, end);
    return adam_in_one_pass<Real, Decay, false, false>(step, tensor, begin, end);
}

template <class Type>
LASTGOOD_INLINE void run_real(const DeviceStep& step, const DeviceTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    using Real = typename Type::Real;
    const bool vectors = tensor.aligned && tensor.count % 4 == 0;
    const bool alike = step.decay != DeviceDecay::l2 || (vectors ? step.lanes : step.lanes >> 4) % 16 == 15;
    if (!step.adam || step.family != DeviceFamily::fused || step.factors.size() > 2 || !alike)
        return run<Type>(step, tensor, begin, end);
    switch (step.decay) {
        case DeviceDecay::none: return run_pass<Real, DeviceDecay::none>(step, tensor, begin, end);
        case DeviceDecay::l2: return run_pass<Real, DeviceDecay::l2>(step, tensor, begin, end);
        case DeviceDecay::decoupled: return run_pass<Real, DeviceDecay::decoupled>(step, tensor, begin, end);
    }
}

struct Body {
    static LASTGOOD_INLINE void over(const DeviceStep& step, const DeviceTensor& tensor, std::uint64_t begin,
                                     std::uint64_t end) {
        switch (step.type) {
            case DeviceType::float32: return run_real<Float32>(step, tensor, begin, end);
            case DeviceType::float64: return run_real<Float64>(step, tensor, begin, end);
            case DeviceType::bfloat16: return run<Bfloat16>(step, tensor, begin, end);
        }
    }
};

void check(const DeviceStep& step, const std::vector<DeviceTensor>& tensors) {
    if (step.divisor != 0 && step.family != DeviceFamily::fused)
        throw std::invalid_argument("device_step: only fused kernels divide by a loss scale");
    if (!step.adam && step.decay == DeviceDecay::decoupled)
        throw std::invalid_argument("device_step: SGD has no decoupled weight decay");
    for (const DeviceTensor& tensor : tensors) {
        if (tensor.count == 0) continue;
        const bool whole = tensor.parameter != 0 && tensor.gradient != 0 &&
                           (!step.adam || (tensor.first != 0 && tensor.second != 0 && !tensor.fresh));
        if (!whole) throw std::invalid_argument("device_step: a tensor of a step lacks an address");
    }
}

}  // namespace

void device_step(const DeviceStep& step, const std::vector<DeviceTensor>& tensors, unsigned threads,
                 const std::string& variant) {
    const auto run_piece = step_runner<Body, DeviceStep, DeviceTensor>(step_variant(variant));
    check(step, tensors);
    std::vector<std::uint64_t> counts;
    counts.reserve(tensors.size());
    for (const DeviceTensor& tensor : tensors) counts.push_back(tensor.count);
    in_pieces(counts, threads, [&](std::size_t tensor, std::uint64_t begin, std::uint64_t end) {
        run_piece(step, tensors[tensor], begin, end);
    });
}

}  // namespace lastgood
