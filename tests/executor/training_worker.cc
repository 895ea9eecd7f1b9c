// SPDX-License-Identifier: Apache-2.0
// One rank of a training of the example's GPT in C++, for tests/python/cpp, which compares it with the same
// training in Python. Prints a line for each step: the loss of each micro-batch, and the norm of the
// gradients where it is clipped, as the 32 bits of the number. Settings come as name=value.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstring>
#include <iostream>
#include <map>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "examples/gpt_cpp/gpt.h"
#include "examples/gpt_cpp/text.h"
#include "shardplan/executor/backends.h"
#include "shardplan/executor/training.h"
#include "shardplan/schemas/io.h"

namespace {

using shardplan::executor::GradScaler;
using shardplan::executor::OnDeviation;
using shardplan::executor::Training;

class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const std::size_t equals = argument.find('=');
      values_[argument.substr(0, equals)] = argument.substr(equals + 1);
    }
  }
  std::string Text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  std::int64_t Number(const std::string& name, std::int64_t otherwise) const {
    const std::string text = Text(name);
    return text.empty() ? otherwise : std::stoll(text);
  }
  double Real(const std::string& name) const { return Text(name).empty() ? 0 : std::stod(Text(name)); }

 private:
  std::map<std::string, std::string> values_;
};

std::string Bits(const at::Tensor& value) {
  const float number = value.item<float>();
  std::uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return fmt::format("{:08x}", bits);
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const std::string& kind,
                                                       const std::vector<at::Tensor>& parameters) {
  if (kind == "sgd") {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05));
  }
  if (kind == "momentum") {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  if (kind == "adam") {
    return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(3e-3));
  }
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(3e-3));
}

int Run(const Settings& settings) {
  at::set_num_threads(1);
  const std::int64_t rank = settings.Number("rank", 0), ranks = settings.Number("ranks", 1);
  gpt::Config config;
  const gpt::Text text(settings.Text("text"), config.context);
  config.vocabulary = text.vocabulary;
  config.layers = settings.Number("layers", 3);
  config.width = settings.Number("width", 44);
  torch::manual_seed(settings.Number("seed", 0));
  gpt::Gpt model(config);
  const std::string frozen = settings.Text("frozen");
  for (const auto& parameter : model->named_parameters()) {
    if (!frozen.empty() && parameter.key().starts_with(frozen)) parameter.value().set_requires_grad(false);
  }
  shardplan::Result<shardplan::Plan> plan = shardplan::ReadPlan(settings.Text("plan"));
  if (!plan) {
    std::cerr << ToString(plan.error()) << "\n";
    return 3;
  }
  shardplan::executor::TrainingOptions options;
  options.rank = rank;
  options.ranks = ranks;
  options.store = c10::make_intrusive<c10d::FileStore>(settings.Text("store"), static_cast<int>(ranks));
  options.timeout = std::chrono::seconds(settings.Number("timeout", 60));
  if (settings.Text("device") == "cuda") options.device = c10::Device(c10::kCUDA, 0);
  if (settings.Text("deviation") == "on_demand") options.on_deviation = OnDeviation::kOnDemand;
  options.warn = [](const std::string& warning) { std::cout << "warning " << warning << "\n"; };
  auto created = Training::Create(model.ptr(), model->calls, std::move(*plan), options);
  if (!created) {
    std::cerr << ToString(created.error()) << "\n";
    return 4;
  }
  Training& training = **created;
  const auto optimizer = MakeOptimizer(settings.Text("optimizer", "adamw"), training.parameters());
  GradScaler scaler(training, {.initial_scale = 1024.0});
  std::map<std::string, at::Tensor> extra = {{"step", at::zeros({}, at::kLong)}};
  std::int64_t first = 0;
  if (!settings.Text("load").empty()) {
    auto* loaded = settings.Text("load_optimizer") == "no" ? nullptr : optimizer.get();
    const auto from = settings.Text("load_optimizer") == "no" ? std::map<std::string, at::Tensor>() : extra;
    if (shardplan::Status status = training.Load(settings.Text("load"), loaded, from); !status) {
      std::cerr << ToString(status.error()) << "\n";
      return 5;
    }
    first = extra["step"].item<std::int64_t>();
  }
  const std::int64_t rows = settings.Number("rows", 2);
  const std::int64_t microbatches = settings.Number("microbatches", 1);
  const bool no_sync = settings.Text("no_sync") == "yes";
  const double clip = settings.Real("clip");
  for (std::int64_t step = first; step < first + settings.Number("steps", 3); ++step) {
    std::string line = fmt::format("step {}", step);
    if (settings.Text("evaluate") == "yes") {
      const at::NoGradGuard no_grad;
      const auto [tokens, targets] = text.Batch(1000 + step, rank * rows, rows);
      line += " evaluation " + Bits(gpt::Loss(model->calls(model, tokens), targets));
    }
    if (settings.Text("interrupt") == "yes" && step == first + 1) {
      const auto [tokens, targets] = text.Batch(step, rank * rows, rows);
      gpt::Loss(model->calls(model, tokens), targets);  // and no backward
      training.AbandonStep();
    }
    const std::int64_t more = settings.Number("extra_microbatch_in_step", -1) == step ? 1 : 0;
    for (std::int64_t m = 0; m < microbatches + more; ++m) {
      const std::int64_t row = (rank * microbatches + m) * rows;
      const auto [tokens, targets] = text.Batch(step, row, rows);
      std::optional<Training::NoSync> keeps;
      if (no_sync && m + 1 < microbatches) keeps.emplace(training);
      const at::Tensor loss =
          gpt::Loss(model->calls(model, tokens), targets) / static_cast<double>(microbatches);
      (settings.Text("scaler") == "yes" ? scaler.Scale(loss) : loss).backward();
      line += " loss " + Bits(loss);
    }
    if (settings.Text("scaler") == "yes") scaler.Unscale();
    if (clip > 0) line += " norm " + Bits(training.ClipGradNorm(clip));
    if (settings.Text("scaler") == "yes") {
      line += scaler.Step(*optimizer) ? "" : " left out";
    } else if (settings.Text("step") == "direct") {
      optimizer->step();
    } else {
      training.Step(*optimizer);
    }
    optimizer->zero_grad();
    std::cout << line << std::endl;
    if (settings.Number("die_in_step", -1) == step && settings.Number("dies", 0) == rank) std::abort();
    if (settings.Text("background") == "yes" && step == first) {
      extra["step"].fill_(step + 1);
      if (shardplan::Status status = training.SaveInBackground(settings.Text("save"), optimizer.get(), extra);
          !status) {
        std::cerr << ToString(status.error()) << "\n";
        return 6;
      }
    }
  }
  if (settings.Text("background") == "yes") {
    if (shardplan::Status status = training.Wait(); !status) {
      std::cerr << ToString(status.error()) << "\n";
      return 6;
    }
  } else if (!settings.Text("save").empty()) {
    extra["step"].fill_(first + settings.Number("steps", 3));
    if (shardplan::Status status = training.Save(settings.Text("save"), optimizer.get(), extra); !status) {
      std::cerr << ToString(status.error()) << "\n";
      return 6;
    }
  }
  std::cout << "deviation " << training.deviation() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(Settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 7;
  }
}
