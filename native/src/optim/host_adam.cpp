#include "optim/host_adam.hpp"

#include <cmath>
#include <cstddef>
#include <stdexcept>

#include "optim/arithmetic.hpp"
#include "optim/steps.hpp"

namespace lastgood {
namespace {

// What torch's compiler contracts in its kernel: the decay, either kind, and the last product of the second moment; the first
// moment is torch's lerp. optim/host_adam.py compares with the kernel before it uses this.
template <class Real, bool L2, bool Amsgrad>
LASTGOOD_INLINE void run(const HostAdam& step, const HostAdamTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    const std::size_t count = std::size_t(end - begin);
    Real* __restrict parameters = reinterpret_cast<Real*>(tensor.parameter) + begin;
    const Real* __restrict gradients = reinterpret_cast<const Real*>(tensor.gradient) + begin;
    Real* __restrict firsts = reinterpret_cast<Real*>(tensor.first) + begin;
    Real* __restrict seconds = reinterpret_cast<Real*>(tensor.second) + begin;
    Real* __restrict largests = Amsgrad ? reinterpret_cast<Real*>(tensor.largest) + begin : nullptr;
    const Real factor1 = Real(step.factor1), factor2 = Real(step.factor2), limit = Real(step.limit);
    const Real sign = step.maximize ? Real(-1) : Real(1);
    const Real decay = Real(step.weight_decay);
    const Real kept = step.decoupled ? Real(fused(-step.lr, step.weight_decay, 1.0)) : Real(1);
    const Real weight1 = Real(1 - step.beta1), weight2 = Real(1 - step.beta2), beta2 = Real(step.beta2);
    const Real eps = Real(step.eps), size = Real(tensor.step_size), correction = Real(tensor.correction);
    for (std::size_t i = 0; i < count; ++i) {
        Real gradient = gradients[i] * factor1 * factor2;
        // Written so that what is no number stays none.
        gradient = gradient < -limit ? -limit : gradient;
        gradient = gradient > limit ? limit : gradient;
        gradient = gradient * sign;
        Real parameter = parameters[i];
        if (L2)
            gradient = fused(parameter, decay, gradient);
        else
            parameter = parameter * kept;
        const Real first = fused(weight1, gradient - firsts[i], firsts[i]);
        const Real second = fused(weight2 * gradient, gradient, seconds[i] * beta2);
        firsts[i] = first;
        seconds[i] = second;
        Real squares = second;
        if (Amsgrad) {
            squares = largests[i] < second || second != second ? second : largests[i];
            largests[i] = squares;
        }
        parameters[i] = parameter - size * first / (root(squares) / correction + eps);
    }
}

template <class Real>
LASTGOOD_INLINE void run_real(const HostAdam& step, const HostAdamTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    const bool l2 = step.weight_decay != 0 && !step.decoupled;
    if (tensor.largest != 0) return l2 ? run<Real, true, true>(step, tensor, begin, end) : run<Real, false, true>(step, tensor, begin, end);
    return l2 ? run<Real, true, false>(step, tensor, begin, end) : run<Real, false, false>(step, tensor, begin, end);
}

struct Body {
    static LASTGOOD_INLINE void over(const HostAdam& step, const HostAdamTensor& tensor, std::uint64_t begin, std::uint64_t end) {
        if (step.wide) return run_real<double>(step, tensor, begin, end);
        return run_real<float>(step, tensor, begin, end);
    }
};

void check(const HostAdam& step, const std::vector<HostAdamTensor>& tensors) {
    if (!(step.beta1 <= 1 && float(1 - step.beta1) < 0.5F))
        throw std::invalid_argument("host_adam: beta1 must be above 0.5, also in float32, and at most 1");
    if (!(step.limit >= 0)) throw std::invalid_argument("host_adam: the limit of a gradient must be a number from 0 up");
    const std::uint64_t whole = 64 / (step.wide ? sizeof(double) : sizeof(float));
    for (const HostAdamTensor& tensor : tensors) {
        if (tensor.count % whole != 0)
            throw std::invalid_argument("host_adam: " + std::to_string(tensor.count) + " elements are not whole 64 bytes");
        if (tensor.count != 0 && (!tensor.parameter || !tensor.gradient || !tensor.first || !tensor.second))
            throw std::invalid_argument("host_adam: a tensor of a step lacks an address");
    }
}

}  // namespace

void host_adam(const HostAdam& step, const std::vector<HostAdamTensor>& tensors, unsigned threads,
               const std::string& variant) {
    const auto run_piece = step_runner<Body, HostAdam, HostAdamTensor>(step_variant(variant));
    check(step, tensors);
    std::vector<std::uint64_t> counts;
    counts.reserve(tensors.size());
    for (const HostAdamTensor& tensor : tensors) counts.push_back(tensor.count);
    in_pieces(counts, threads, [&](std::size_t tensor, std::uint64_t begin, std::uint64_t end) {
        run_piece(step, tensors[tensor], begin, end);
    });
}

}  // namespace lastgood
