// Workers that begin as copies of this process, with libtorch loaded: a new program takes half a
// second of a core to load it, a copy some milliseconds.
//
// The server is a process of its own, forked while this one has a single thread, that does nothing
// but fork workers. It ends with this process. Signals of a terminal are not for it.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace motley {

// What a worker begins with.
struct WorkerStart {
  std::vector<std::string> words;                  // its command line
  std::map<std::string, std::string> environment;  // all of it
  std::string report_variable;                     // has the number of `report` there
  int report = -1;                                 // descriptors of this process:
  int output = -1;                                 // its standard output; -1: as here
  int network = -1;                                // its namespace; -1: as here
};

class ForkServer {
 public:
  using Main = int (*)(int, char**);
  static constexpr const char* kName = "motley-forks";  // of the server, as ps shows it

  // `main`: what workers do with their command line. REQUIRES: this process has one thread.
  explicit ForkServer(Main main);
  ~ForkServer();
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  // A child of this process. Nothing: the server is gone.
  std::optional<pid_t> start(const WorkerStart& worker);

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

}  // namespace motley
