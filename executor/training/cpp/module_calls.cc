// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/module_calls.h"

#include <fmt/format.h>

#include <stdexcept>

namespace shardplan::executor {

void ModuleCalls::Attach(const torch::nn::Module& model, ModuleListener& listener) {
  if (state_->listener != nullptr) {
    throw std::logic_error(
        "shardplan: the model's calls are listened to already (by a training, or a recorder)");
  }
  State state{.listener = &listener, .names = {}, .by_name = {}, .keys = {}, .by_address = {}};
  for (const auto& item : model.named_modules()) {
    const auto next = static_cast<std::int32_t>(state.names.size());
    const auto [known, is_new] = state.by_address.try_emplace(item.value().get(), next);
    if (is_new) state.names.push_back(item.key());
    state.keys.push_back(std::make_unique<const std::string>(item.key()));
    state.by_name.emplace(*state.keys.back(), known->second);
  }
  *state_ = std::move(state);
}

void ModuleCalls::Detach() { *state_ = State(); }

std::int32_t ModuleCalls::Find(std::string_view fqn) const {
  const auto found = state_->by_name.find(fqn);
  if (found == state_->by_name.end()) {
    throw std::invalid_argument(
        fmt::format("shardplan: a call of \"{}\", but the model has no such module", fqn));
  }
  return found->second;
}

std::int32_t ModuleCalls::Find(const torch::nn::Module& module) const {
  const auto found = state_->by_address.find(&module);
  if (found == state_->by_address.end()) {
    throw std::invalid_argument(
        fmt::format("shardplan: a call of a {} that is not registered in the model", module.name()));
  }
  return found->second;
}

}  // namespace shardplan::executor
