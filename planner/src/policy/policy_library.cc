// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <string_view>

#include "shardplan/planner/policy.h"
#include "shardplan/schemas/policy_knobs.h"

namespace shardplan {
namespace {

constexpr std::string_view kExpected = "a library built with shardplan_add_policy";

std::unexpected<Error> Wrong(const std::string& path, std::string message, std::string found = {},
                             std::string expected = std::string(kExpected)) {
  return std::unexpected(Error{.code = ErrorCode::kBadInput,
                               .message = std::move(message),
                               .file = path,
                               .pointer = {},
                               .found = std::move(found),
                               .expected = std::move(expected)});
}

std::string LoaderError() {
  const char* error = ::dlerror();
  return error == nullptr ? "" : error;
}

void Close(void* library) { ::dlclose(library); }

// The fault that makes a description useless, whatever is planned; "": none.
std::string WhatIsWrong(const PolicyDescription& policy) {
  if (policy.name.empty()) return "its policy has no name";
  if (IsBuiltIn(policy.name)) return fmt::format("its policy is called {}, which is built in", policy.name);
  if (policy.make == nullptr) return fmt::format("policy {} has nothing that makes it", policy.name);
  for (std::size_t k = 0; k < policy.knobs.size(); ++k) {
    const std::string& name = policy.knobs[k].name;
    const auto before = policy.knobs.begin() + static_cast<std::ptrdiff_t>(k);
    if (name.empty()) return fmt::format("a knob of policy {} has no name", policy.name);
    if (std::ranges::find(policy.knobs.begin(), before, name, &PolicyKnob::name) != before) {
      return fmt::format("two knobs of policy {} are called {}", policy.name, name);
    }
  }
  return {};
}

}  // namespace

Result<PolicyLibrary> PolicyLibrary::Load(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return Wrong(path, "there is no such file");
  // A name without a folder would be looked for where the system's libraries are.
  Handle handle(::dlopen(std::filesystem::absolute(path).c_str(), RTLD_LAZY | RTLD_LOCAL), Close);
  if (handle == nullptr) return Wrong(path, "cannot be loaded", LoaderError());
  const auto* stamp = static_cast<const char*>(::dlsym(handle.get(), "shardplan_policy_stamp"));
  void* entry = ::dlsym(handle.get(), "shardplan_policy");
  if (stamp == nullptr || entry == nullptr) {
    return Wrong(path, "has no policy: SHARDPLAN_POLICY(...) is in none of its files");
  }
  constexpr std::string_view kStamp = SHARDPLAN_POLICY_STAMP;
  if (stamp != kStamp) {
    return Wrong(path, "was built for another shardplan: build it again", stamp, std::string(kStamp));
  }
  PolicyDescription policy;
  try {
    reinterpret_cast<void (*)(PolicyDescription&)>(entry)(policy);
  } catch (const std::exception& thrown) {
    return Wrong(path, fmt::format("its policy is not described, an exception is thrown: {}", thrown.what()),
                 {}, {});
  } catch (...) {
    return Wrong(path, "its policy is not described, something is thrown that is no std::exception", {}, {});
  }
  policy.library = path;
  if (std::string wrong = WhatIsWrong(policy); !wrong.empty()) return Wrong(path, std::move(wrong), {}, {});
  return PolicyLibrary(std::move(handle), std::move(policy));
}

}  // namespace shardplan
