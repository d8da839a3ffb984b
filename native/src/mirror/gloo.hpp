// Gloo's messages in a TCP connection. tests/mirror/support/plain/gloo.py is the plain twin, and explains the rules.
#pragma once

#include <memory>

#include "mirror/sockets.hpp"

namespace lastgood::mirror {

std::unique_ptr<Framing> gloo_framing();

}  // namespace lastgood::mirror
