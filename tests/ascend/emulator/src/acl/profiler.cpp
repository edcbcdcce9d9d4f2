// The profiler, which records nothing, and mstx, whose ranges and marks go into a trace: a JSON
// line each time a stream comes to one, in NPU_EMU_TRACE_DIR/marks<RANK>.jsonl.
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>

#include "acl/acl_prof.h"
#include "emu.h"

using namespace npu_emu;

namespace {

std::mutex g_mutex;
std::map<uint64_t, void*> g_streams;  // of the ranges that are open
std::atomic<uint64_t> g_next{1};

FILE* trace_file() {
  static FILE* const file = []() -> FILE* {
    const std::string directory = env_string("NPU_EMU_TRACE_DIR", "");
    if (directory.empty()) return nullptr;
    mkdir(directory.c_str(), 0755);
    const std::string path = directory + "/marks" + env_string("RANK", "0") + ".jsonl";
    FILE* opened = fopen(path.c_str(), "a");
    if (opened) setvbuf(opened, nullptr, _IOLBF, 1 << 16);
    return opened;
  }();
  return file;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return out + "\"";
}

// A mark without a stream is one of the host's: it is where it is called.
void note(const char* event, uint64_t id, const std::string& domain, const std::string& message,
          void* stream) {
  if (!trace_file()) return;
  std::ostringstream fields;
  fields << "\"event\":\"" << event << "\",\"id\":" << id
         << ",\"stream\":" << (stream ? npu_emu_stream_id(stream) : -1);
  if (!message.empty()) {
    fields << ",\"domain\":" << quoted(domain) << ",\"message\":" << quoted(message);
  }
  auto write = [text = fields.str()] {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const double t_us = std::chrono::duration<double, std::micro>(now).count();
    std::lock_guard<std::mutex> lock(g_mutex);
    fprintf(trace_file(), "{\"t_us\":%.1f,%s}\n", t_us, text.c_str());
  };
  if (stream) {
    enqueue(stream, write);
  } else {
    write();
  }
}

uint64_t start(const std::string& domain, const char* message, void* stream) {
  const uint64_t id = g_next++;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_streams[id] = stream;
  }
  note("begin", id, domain, message, stream);
  return id;
}

void end(uint64_t id) {
  void* stream = nullptr;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = g_streams.find(id);
    if (found == g_streams.end()) return;
    stream = found->second;
    g_streams.erase(found);
  }
  note("end", id, "", "", stream);
}

}  // namespace

extern "C" {

struct mstxDomainRegistration_st {
  std::string name;
};
using Domain = mstxDomainRegistration_st*;

Domain mstxDomainCreateA(const char* name) { return new mstxDomainRegistration_st{name}; }
void mstxDomainDestroy(Domain domain) { delete domain; }

uint64_t mstxRangeStartA(const char* message, void* stream) {
  return start("default", message, stream);
}
uint64_t mstxDomainRangeStartA(Domain domain, const char* message, void* stream) {
  return start(domain->name, message, stream);
}
void mstxRangeEnd(uint64_t id) { end(id); }
void mstxDomainRangeEnd(Domain, uint64_t id) { end(id); }

void mstxMarkA(const char* message, void* stream) {
  note("mark", g_next++, "default", message, stream);
}
void mstxDomainMarkA(Domain domain, const char* message, void* stream) {
  note("mark", g_next++, domain->name, message, stream);
}

void* mstxMemHeapRegister(Domain, const void*) { return nullptr; }
void mstxMemHeapUnregister(Domain, void*) {}
void mstxMemRegionsRegister(Domain, const void*) {}
void mstxMemRegionsUnregister(Domain, const void*) {}

aclError aclprofInit(const char*, size_t) { return ACL_SUCCESS; }
aclError aclprofFinalize() { return ACL_SUCCESS; }
aclError aclprofStart(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofStop(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofSetConfig(aclprofConfigType, const char*, size_t) { return ACL_SUCCESS; }
aclError aclprofDestroyConfig(const aclprofConfig*) { return ACL_SUCCESS; }
aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, aclprofAicoreMetrics,
                                   const aclprofAicoreEvents*, uint64_t) {
  static char config;
  return reinterpret_cast<aclprofConfig*>(&config);
}

}  // extern "C"
