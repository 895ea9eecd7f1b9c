// SPDX-License-Identifier: Apache-2.0
#include "cost/operator_class.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "cost/operator_classes_json.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

struct OperatorClass {
  std::string name;
  std::vector<std::string> names;
  std::vector<std::string> parts;  // names of kernels come in many spellings, as flash_attn_backward
};

// Constant: what the build read from the table.
const std::vector<OperatorClass>& Table() {
  static const std::vector<OperatorClass> table = [] {
    std::vector<OperatorClass> classes;
    for (const nlohmann::json& entry : nlohmann::json::parse(internal::kOperatorClassesJson))
      classes.push_back({entry.at("class"), entry.at("names"), entry.at("parts")});
    return classes;
  }();
  return table;
}

// Without namespace and overload: torch writes "aten::mm.out" in C++ and "aten.mm.out" in Python.
std::string_view PlainName(std::string_view name) {
  if (const std::size_t colons = name.find("::"); colons != std::string_view::npos)
    name.remove_prefix(colons + 2);
  else if (const std::size_t dot = name.find('.'); dot != std::string_view::npos)
    name.remove_prefix(dot + 1);
  return name.substr(0, name.find('.'));
}

bool Has(const OperatorClass& of, std::string_view plain_name) {
  return std::ranges::find(of.names, plain_name) != of.names.end() ||
         std::ranges::any_of(of.parts, [&](std::string_view part) {
           return plain_name.find(part) != std::string_view::npos;
         });
}

}  // namespace

const std::vector<std::string_view>& OperatorClasses() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const OperatorClass& one : Table()) all.push_back(one.name);
    all.push_back("elementwise");
    all.push_back("other");
    return all;
  }();
  return names;
}

std::size_t OperatorClassOf(std::string_view name) {
  const std::vector<OperatorClass>& table = Table();
  const std::string_view plain = PlainName(name);
  const auto found = std::ranges::find_if(table, [&](const OperatorClass& one) { return Has(one, plain); });
  const auto index = static_cast<std::size_t>(found - table.begin());
  if (found != table.end()) return index;
  return name.starts_with("aten") ? index : index + 1;
}

bool IsMatmulOperator(std::string_view name) {
  const std::string_view of = OperatorClasses()[OperatorClassOf(name)];
  return of == "matmul" || of == "attention" || of == "convolution";
}

bool IsAttentionOperator(std::string_view name) {
  return OperatorClasses()[OperatorClassOf(name)] == "attention";
}

bool IsMatrixProduct(std::string_view name) {
  const std::vector<std::string>& products = Table().front().names;
  return std::ranges::find(products, PlainName(name)) != products.end();
}

}  // namespace shardplan
