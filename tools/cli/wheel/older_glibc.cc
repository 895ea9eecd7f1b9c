// SPDX-License-Identifier: Apache-2.0
// Functions of glibc that the static libstdc++ of a newer system asks for, for wheels that are to start on
// glibc 2.34. Part of wheels alone.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

// glibc 2.36; std::random_device's. There is no way to fail.
extern "C" std::uint32_t arc4random() {
  std::uint32_t value = 0;
  if (::getentropy(&value, sizeof value) != 0) std::abort();
  return value;
}
