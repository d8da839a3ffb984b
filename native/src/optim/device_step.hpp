// Steps of SGD, Adam and AdamW in the order of operations of torch's CUDA kernels, contractions into FMA included, so that a
// CPU comes to the same bits. tests/optim/cuda_twin.py is the same in numpy, and tests/optim/data holds what a GPU made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lastgood {

enum class DeviceType { float32, float64, bfloat16 };

// The family of kernels. A list of kernels (foreach) and one kernel an operation (single) round to the parameter's type after
// each operation, and differ in how Adam divides by a number; one kernel for all (fused) rounds where it stores.
enum class DeviceFamily { foreach, single, fused };

enum class DeviceDecay { none, l2, decoupled };

// What is the same for all tensors of a step. Numbers are double, as Python's; each kernel rounds them as torch's does.
struct DeviceStep {
    bool adam = true;  // or SGD
    DeviceFamily family = DeviceFamily::foreach;
    DeviceType type = DeviceType::float32;
    DeviceDecay decay = DeviceDecay::none;
    bool maximize = false;
    bool nesterov = false;
    double lr = 0.0;
    double weight_decay = 0.0;
    double beta1 = 0.0;
    double beta2 = 0.0;
    double eps = 0.0;
    double momentum = 0.0;
    double dampening = 0.0;
    // Before the step, each with a rounding of its own: the loss scale's inverse, the coefficient of a clipped norm; then
    // a bound on each value (where it is not negative).
    std::vector<double> factors;
    double limit = -1.0;
    double divisor = 0.0;  // fused only: the loss scale, by which the kernel itself divides; 0 for none
    // Which of the four elements that a CUDA thread holds are contracted in the one place where compilers differ (Adam's
    // L2 decay; SGD's last subtraction): bits 0 to 3 where all tensors are aligned, bits 4 to 7 elsewhere.
    unsigned lanes = 0xFF;
};

// One parameter: addresses of arrays of `count` elements. For SGD `first` is the momentum buffer, or null.
struct DeviceTensor {
    std::uintptr_t parameter = 0;
    std::uintptr_t gradient = 0;
    std::uintptr_t first = 0;
    std::uintptr_t second = 0;
    std::uintptr_t largest = 0;  // amsgrad's, or null
    std::uint64_t count = 0;
    double step_size = 0.0;   // Adam: foreach and single -lr / (1 - beta1^t); fused lr / (1 - beta1^t)
    double correction = 1.0;  // Adam: sqrt(1 - beta2^t)
    bool fresh = false;       // SGD: the buffer holds nothing yet
    bool aligned = true;      // as the device's tensors were, for `lanes`
};

// Makes one step on `threads` threads (the calling one among them). Gradients are left as they are. Throws
// std::invalid_argument for a step that no kernel of torch's makes, and for an unknown `variant` ("" is the fastest).
void device_step(const DeviceStep& step, const std::vector<DeviceTensor>& tensors, unsigned threads,
                 const std::string& variant);

}  // namespace lastgood
