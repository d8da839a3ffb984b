// Steps of torch's fused CPU Adam and AdamW, to the bit, that clip and unscale gradients as they read them. torch's own kernel
// takes prepared gradients only, and preparing them is a pass over memory of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lastgood {

// What is the same for all tensors of a step; double, as Python's, and rounded where torch's kernel rounds.
struct HostAdam {
    bool wide = false;  // float64, or float32
    bool decoupled = false;
    bool maximize = false;
    double lr = 0.0;
    double weight_decay = 0.0;
    double beta1 = 0.0;  // at least 0.5: below, the kernel computes its first moment otherwise
    double beta2 = 0.0;
    double eps = 0.0;
    // Before the step, each product with a rounding of its own: the loss scale's inverse, the coefficient of a clipped norm;
    // then a bound on each value. 1 and infinity change nothing, to the bit.
    double factor1 = 1.0;
    double factor2 = 1.0;
    double limit = 0.0;
};

// One parameter: addresses of arrays of `count` elements. `count` is a multiple of 64 bytes of them, since the kernel rounds
// the elements behind its last whole vector otherwise.
struct HostAdamTensor {
    std::uintptr_t parameter = 0;
    std::uintptr_t gradient = 0;
    std::uintptr_t first = 0;
    std::uintptr_t second = 0;
    std::uintptr_t largest = 0;  // amsgrad's, or null
    std::uint64_t count = 0;
    double step_size = 0.0;   // lr / (1 - beta1^t)
    double correction = 1.0;  // sqrt(1 - beta2^t)
};

// Makes one step on `threads` threads (the calling one among them). Gradients are left as they are. Throws
// std::invalid_argument for a step that the kernel makes otherwise, and for an unknown `variant` ("" is the fastest).
void host_adam(const HostAdam& step, const std::vector<HostAdamTensor>& tensors, unsigned threads,
               const std::string& variant);

}  // namespace lastgood
