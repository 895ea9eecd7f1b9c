// SPDX-License-Identifier: Apache-2.0
// The text that the GPT learns, and the rows of a step. gpt.py has the same in Python.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gpt {

// A text as numbers of its bytes, in the order of their values.
struct Text {
  // context: tokens of a row. std::invalid_argument: the file cannot be read, or is shorter than a row.
  Text(const std::string& path, std::int64_t context) : context(context) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::invalid_argument(path + ": cannot be read");
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    std::map<unsigned char, std::int64_t> numbers;
    for (const char byte : bytes) numbers[static_cast<unsigned char>(byte)] = 0;
    for (auto& [byte, number] : numbers) number = vocabulary++;
    for (const char byte : bytes) tokens.push_back(numbers[static_cast<unsigned char>(byte)]);
    if (static_cast<std::int64_t>(tokens.size()) <= context + 1) {
      throw std::invalid_argument(path + ": is shorter than one row of " + std::to_string(context) +
                                  " bytes");
    }
  }

  // Tokens and targets, [rows, context] each: `rows` rows of the step's batch from `row` on, the same
  // whatever number of ranks shares the batch.
  std::pair<at::Tensor, at::Tensor> Batch(std::int64_t step, std::int64_t row, std::int64_t rows) const {
    const auto length = static_cast<std::int64_t>(tokens.size()) - context - 1;
    std::vector<at::Tensor> batch;
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto begin = tokens.begin() + (7919 * step + 104729 * (row + i) + 31) % length;
      batch.push_back(at::tensor(std::vector<std::int64_t>(begin, begin + context + 1)));
    }
    const at::Tensor all = at::stack(batch);
    return {all.narrow(1, 0, context).contiguous(), all.narrow(1, 1, context).contiguous()};
  }

  std::int64_t context;
  std::vector<std::int64_t> tokens;
  std::int64_t vocabulary = 0;
};

}  // namespace gpt
