// Injection of faults into the calls of all emulated libraries.
#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "emu.h"

namespace npu_emu {
namespace {

std::mutex g_mutex;

struct FaultRule {
  long rank = -1, call = 1, delay_ms = 100;
  std::string op;
  Fault fault = Fault::kNone;
  long seen = 0;
};

Fault fault_named(const std::string& name) {
  static const std::map<std::string, Fault> names = {
      {"fail", Fault::kFail}, {"async", Fault::kAsync}, {"hang", Fault::kHang},
      {"drop", Fault::kDrop}, {"exit", Fault::kExit},   {"delay", Fault::kDelay}};
  auto found = names.find(name);
  if (found != names.end()) return found->second;
  fprintf(stderr, "[npu-emu] unknown fault kind %s\n", name.c_str());
  return Fault::kNone;
}

// Rules for this rank, from "rank=1,call=3,kind=hang,op=Send;rank=0,...".
std::vector<FaultRule> parse_rules() {
  std::vector<FaultRule> rules;
  std::istringstream all(env_string("NPU_EMU_FAULT", ""));
  for (std::string text; std::getline(all, text, ';');) {
    FaultRule rule;
    std::istringstream fields(text);
    for (std::string field; std::getline(fields, field, ',');) {
      const size_t equals = field.find('=');
      const std::string key = field.substr(0, equals);
      const std::string value = equals == std::string::npos ? "" : field.substr(equals + 1);
      if (key == "rank")
        rule.rank = std::stol(value);
      else if (key == "call")
        rule.call = std::stol(value);
      else if (key == "op")
        rule.op = value;
      else if (key == "ms")
        rule.delay_ms = std::stol(value);
      else if (key == "kind")
        rule.fault = fault_named(value);
      else
        fprintf(stderr, "[npu-emu] unknown field %s in NPU_EMU_FAULT\n", key.c_str());
    }
    if (rule.rank < 0 || rule.rank == env_int("RANK", 0)) rules.push_back(rule);
  }
  return rules;
}

}  // namespace
}  // namespace npu_emu

using namespace npu_emu;

extern "C" int npu_emu_next_fault(const char* op, int* delay_ms) {
  static auto& rules = *new std::vector<FaultRule>(parse_rules());
  std::lock_guard<std::mutex> lock(g_mutex);
  Fault result = Fault::kNone;
  for (FaultRule& rule : rules) {
    if (!rule.op.empty() && rule.op != op) continue;
    if (++rule.seen != rule.call) continue;
    result = rule.fault;
    *delay_ms = static_cast<int>(rule.delay_ms);
    fprintf(stderr, "[npu-emu] injecting a fault into %s, call %ld\n", op, rule.call);
  }
  return static_cast<int>(result);
}
