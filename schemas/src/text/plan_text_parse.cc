// SPDX-License-Identifier: Apache-2.0
// Reads the text form by rewriting it as the plan's JSON, which the JSON reader then checks: one place
// decides what a valid plan is. The lines that JSON values came from are kept, to say where an error is.
#include <fmt/format.h>

#include <map>
#include <unordered_map>

#include "json/tape.h"
#include "json/writer.h"
#include "names/enum_names.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "text/plan_word_reader.h"

namespace shardplan {
namespace {

constexpr std::string_view kTitle = "shardplan plan text 1";

// Keyword of a line -> the list of the plan that the line adds an element to.
const std::map<std::string_view, std::string_view> kLists = {{"unit", "units"},
                                                             {"buffer", "buffers"},
                                                             {"stream", "streams"},
                                                             {"event", "events"},
                                                             {"input", "inputs"},
                                                             {"model_buffer", "model_buffers"},
                                                             {"communicator", "communicators"},
                                                             {"exchange", "exchanges"}};

std::string_view Trim(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

class TextToJson {
 public:
  // nullopt: `error` says why.
  std::optional<std::string> Convert(std::string_view text) {
    std::size_t number = 0;
    for (std::size_t start = 0; start < text.size();) {
      const std::size_t end = std::min(text.find('\n', start), text.size());
      line_ = ++number;
      if (!AddLine(text.substr(start, end - start))) return std::nullopt;
      start = end + 1;
    }
    if (!title_seen_) {
      Fail("not the text form of a plan", text.empty() ? "an empty text" : "", fmt::format("\"{}\"", kTitle));
      return std::nullopt;
    }
    return Assemble();
  }

  // An error of the JSON reader as an error of the text: the line that the longest known prefix came from.
  Error Locate(Error error) const {
    std::string_view prefix = error.pointer;
    while (!prefix.empty()) {
      const auto found = lines_.find(std::string(prefix));
      if (found != lines_.end()) {
        const std::string_view rest = std::string_view(error.pointer).substr(prefix.size());
        if (!rest.empty()) error.message = fmt::format("{}: {}", rest.substr(1), error.message);
        error.pointer = fmt::format("line {}", found->second);
        return error;
      }
      const std::size_t slash = prefix.rfind('/');
      prefix = slash == std::string_view::npos ? "" : prefix.substr(0, slash);
    }
    if (!error.pointer.empty()) error.message = fmt::format("{}: {}", error.pointer, error.message);
    error.pointer = fmt::format("line {}", line_);
    return error;
  }
  Error TakeError() { return std::move(error_); }

 private:
  bool AddLine(std::string_view raw) {
    const std::string_view line = Trim(raw);
    if (line.empty() || line.front() == '#') return true;
    if (!title_seen_) {
      title_seen_ = line == kTitle;
      return title_seen_ || Fail("not the text form of a plan", fmt::format("\"{}\"", line.substr(0, 60)),
                                 fmt::format("\"{}\"", kTitle));
    }
    const std::size_t indent = raw.find_first_not_of(' ');
    if (line.front() == '[') return AddEntry(line);
    if (indent == 2) return AddTrigger(line);
    if (indent == 4) return AddInstruction(line);
    if (indent != 0)
      return Fail("unexpected indentation", fmt::format("{} spaces", indent), "0, 2 or 4 spaces");
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view keyword = line.substr(0, space);
    const std::string_view rest = Trim(line.substr(space));
    if (keyword == "step") return AddStep(rest);
    if (!IsJson(rest, keyword == "event" ? JsonKind::kString : JsonKind::kObject)) return false;
    if (keyword == "segment") return AddSegment(rest);
    if (keyword == "procedure") return AddProcedure(rest);
    if (keyword == "plan" || keyword == "cluster" || keyword == "strategy") return AddField(keyword, rest);
    const auto list = kLists.find(keyword);
    if (list == kLists.end()) {
      return Fail(fmt::format("unknown keyword \"{}\"", keyword), "",
                  "plan, step, procedure, unit, buffer, stream, event, communicator, exchange, input, "
                  "model_buffer, cluster, strategy or segment");
    }
    Elements& elements = elements_[list->second];
    lines_[fmt::format("/{}/{}", list->second, elements.count)] = line_;
    elements.Add(rest);
    return true;
  }

  bool AddField(std::string_view keyword, std::string_view json) {
    std::string& field = fields_[keyword];
    if (!field.empty()) return Fail(fmt::format("a second \"{}\" line", keyword), "", "one");
    field = json;
    if (keyword == "plan") {
      field = json.substr(1, json.size() - 2);  // its fields belong to the top level
      for (const char* name : {"model", "policy", "digests", "known_faults", "world_size", "tokens_per_step",
                               "ranks_per_batch", "mesh", "unmanaged", "passes", "steady_step"}) {
        lines_[fmt::format("/{}", name)] = line_;
      }
    } else {
      lines_[fmt::format("/{}", keyword)] = line_;
    }
    return true;
  }

  bool AddSegment(std::string_view json) {
    CloseSegment();
    lines_[fmt::format("/segments/{}", segments_.count)] = line_;
    segment_ = json.substr(0, json.size() - 1);
    segment_ += Trim(json.substr(1, json.size() - 2)).empty() ? "\"entries\": [" : ", \"entries\": [";
    entries_ = 0;
    return true;
  }
  bool AddEntry(std::string_view json) {
    if (segment_.empty()) return Fail("an operator outside of a segment", "", "a \"segment\" line before it");
    if (!IsJson(json, JsonKind::kArray)) return false;
    lines_[fmt::format("/segments/{}/entries/{}", segments_.count, entries_)] = line_;
    if (entries_++ > 0) segment_ += ",";
    segment_ += json;
    return true;
  }
  void CloseSegment() {
    if (segment_.empty()) return;
    segments_.Add(segment_ + "]}");
    segment_.clear();
  }

  bool AddStep(std::string_view rest) {
    CloseStep();
    CloseProcedure();
    WordReader words(rest);
    const std::optional<std::string> name = words.NextName();
    if (!name.has_value() || !words.AtEnd())
      return Fail("a step has one name", std::string(rest), "step NAME");
    lines_[fmt::format("/steps/{}", steps_.count)] = line_;
    step_ = fmt::format("{{\"name\": {}, \"triggers\": [", JsonString(*name));
    triggers_ = 0;
    return true;
  }
  bool AddTrigger(std::string_view line) {
    if (step_.empty()) return Fail("a trigger outside of a step", "", "a \"step\" line before it");
    CloseTrigger();
    if (line.starts_with("repeat ")) return AddRepetition(line);
    Result<std::string> json = TriggerJson(line);
    if (!json.has_value()) return FailWith(std::move(json.error()));
    lines_[fmt::format("/steps/{}/triggers/{}", steps_.count, triggers_)] = line_;
    trigger_ = *json + ", \"instructions\": [";
    instructions_ = 0;
    return true;
  }
  bool AddRepetition(std::string_view line) {
    Result<std::string> json = RepetitionJson(line);
    if (!json.has_value()) return FailWith(std::move(json.error()));
    lines_[fmt::format("/steps/{}/triggers/{}", steps_.count, triggers_)] = line_;
    if (triggers_++ > 0) step_ += ",";
    step_ += *json;
    return true;
  }
  bool AddProcedure(std::string_view json) {
    CloseStep();
    CloseProcedure();
    lines_[fmt::format("/procedures/{}", procedures_.count)] = line_;
    procedure_ = json.substr(0, json.size() - 1);
    procedure_ +=
        Trim(json.substr(1, json.size() - 2)).empty() ? "\"instructions\": [" : ", \"instructions\": [";
    instructions_ = 0;
    return true;
  }
  void CloseProcedure() {
    if (procedure_.empty()) return;
    procedures_.Add(procedure_ + "]}");
    procedure_.clear();
  }
  bool AddInstruction(std::string_view line) {
    if (trigger_.empty() && procedure_.empty()) {
      return Fail("an instruction outside of a trigger", "", "a trigger or a procedure before it");
    }
    Result<std::string> json = InstructionJson(line);
    if (!json.has_value()) return FailWith(std::move(json.error()));
    if (!procedure_.empty()) {
      lines_[fmt::format("/procedures/{}/instructions/{}", procedures_.count, instructions_)] = line_;
      if (instructions_++ > 0) procedure_ += ",";
      procedure_ += *json;
      return true;
    }
    lines_[fmt::format("/steps/{}/triggers/{}/instructions/{}", steps_.count, triggers_, instructions_)] =
        line_;
    if (instructions_++ > 0) trigger_ += ",";
    trigger_ += *json;
    return true;
  }
  void CloseTrigger() {
    if (trigger_.empty()) return;
    if (triggers_++ > 0) step_ += ",";
    step_ += trigger_ + "]}";
    trigger_.clear();
  }
  void CloseStep() {
    CloseTrigger();
    if (step_.empty()) return;
    steps_.Add(step_ + "]}");
    step_.clear();
  }

  std::string Assemble() {
    CloseSegment();
    CloseStep();
    CloseProcedure();
    std::string json = "{\"schema\": \"shardplan.plan/1\"";
    const auto add_list = [&](std::string_view name, const Elements& elements) {
      json += fmt::format(", \"{}\": [{}]", name, elements.json);
    };
    for (const auto& [keyword, field] : fields_) {
      if (keyword == "plan") {
        if (!Trim(field).empty()) json += ", " + field;
      } else {
        json += fmt::format(", \"{}\": {}", keyword, field);
      }
    }
    for (const auto& [keyword, list] : kLists) add_list(list, elements_[list]);
    add_list("segments", segments_);
    add_list("steps", steps_);
    add_list("procedures", procedures_);
    return json + "}";
  }

  // One JSON value of that kind and nothing else.
  bool IsJson(std::string_view text, JsonKind kind) {
    Result<JsonTape> tape = JsonTape::Parse(text);
    if (!tape.has_value()) return Fail(tape.error().message, std::string(text.substr(0, 60)), "JSON");
    if ((*tape)[0].kind == kind) return true;
    return Fail("wrong type", tape->Describe(0),
                kind == JsonKind::kString ? "a string" : (kind == JsonKind::kArray ? "a list" : "an object"));
  }
  bool Fail(std::string message, std::string found, std::string expected) {
    return FailWith(Error{.code = ErrorCode::kBadInput,
                          .message = std::move(message),
                          .found = std::move(found),
                          .expected = std::move(expected)});
  }
  bool FailWith(Error error) {
    error_ = std::move(error);
    error_.pointer = fmt::format("line {}", std::max<std::size_t>(line_, 1));
    return false;
  }

  struct Elements {
    std::string json;
    std::size_t count = 0;
    void Add(std::string_view element) {
      if (count++ > 0) json += ",";
      json += element;
    }
  };

  std::size_t line_ = 0;
  bool title_seen_ = false;
  std::map<std::string_view, std::string> fields_;  // "plan", "cluster", "strategy"
  std::map<std::string_view, Elements> elements_;   // by list
  Elements segments_;
  Elements steps_;
  Elements procedures_;
  std::string segment_, step_, trigger_, procedure_;  // being collected; empty: none
  std::size_t entries_ = 0, triggers_ = 0, instructions_ = 0;
  std::unordered_map<std::string, std::size_t> lines_;  // JSON pointer -> line
  Error error_;
};

}  // namespace

Result<Plan> ParsePlanText(std::string_view text) {
  TextToJson converter;
  const std::optional<std::string> json = converter.Convert(text);
  if (!json.has_value()) return std::unexpected(converter.TakeError());
  Result<Plan> plan = ParsePlan(*json);
  if (!plan.has_value()) return std::unexpected(converter.Locate(std::move(plan.error())));
  return plan;
}

}  // namespace shardplan
