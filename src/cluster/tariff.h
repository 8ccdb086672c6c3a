// What devices cost: optional fields of device types in a cluster file, which plans do not depend on.
//
//   device_types: [{name: A100-40GB, price: 1.10, watts: 400, idle_watts: 80}]
#pragma once

#include <map>
#include <string>

namespace motley {

struct Tariff {
  double price = 0;       // of an hour of one device, in any currency; 0: not given
  double watts = 0;       // while it computes or communicates; 0: not given
  double idle_watts = 0;  // while it waits; in the file `watts` where it is not given
};

// By name of the device type; types without a price and without watts are left out.
using Tariffs = std::map<std::string, Tariff>;

// Of a cluster file or a shipped cluster (cluster.h). Throws UserError as load_cluster does.
Tariffs load_tariffs(const std::string& path_or_name);
Tariffs parse_tariffs(const std::string& yaml, const std::string& name);

}  // namespace motley
