// Runs the inputs that are named once each, for compilers without libFuzzer.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** names) {
    for (int number = 1; number < count; ++number) {
        std::ifstream file(names[number], std::ios::binary);
        const std::vector<char> held((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        const std::vector<std::uint8_t> input(held.begin(), held.end());  // of exactly its size, for the sanitizer
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("read %d inputs\n", count - 1);
    return 0;
}
