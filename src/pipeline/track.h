// The devices of a chain one behind the other, in all its orders at once: what stages may take where,
// and the links between them.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "pipeline/chain.h"

namespace motley::pipeline {

class Track {
 public:
  // A sub-cluster behind a set of others: orders that agree on both share it.
  struct Next {
    int block;
    int row;  // of the links to it
  };
  struct Block {
    int cluster;
    int begin = 0, end = 0;  // positions: of its first device, and behind its last
    Seconds extra = 0;       // tied reduction beyond constant_, of a first one
    std::vector<Next> next;  // none: the last of its orders
  };
  struct Position {
    const std::vector<Move>* moves;  // null: behind the last device
    int block, begin;                // and its first position
    int row;  // of the links in front of a stage that starts here; -1: none inside of the block
  };

  Track(const ChainProblem& chain, CostTable* table, Shared* shared);

  int size() const { return static_cast<int>(positions.size()); }
  // Of a position behind all devices of a sub-cluster, where it leads; null: it is another.
  const std::vector<Next>* next_of(int at) const {
    return positions[at].moves == nullptr ? &blocks[positions[at].block].next : nullptr;
  }
  bool last(int at) const {
    const std::vector<Next>* next = next_of(at);
    return next != nullptr && next->empty();
  }
  // Positions count from the first device of their block.
  int behind(int at, const Move& move) const { return positions[at].begin + move.behind; }

  // Of the link in front of a stage, inside a block: those to the next are in its end.
  Seconds gap(int k, int at) const {
    const int row = positions[at].row;
    return row < 0 ? 0 : link_total[row][k];
  }
  bool slow(int k, int at, Seconds p) const {
    const int row = positions[at].row;
    return row >= 0 && link_worst[row][k] > p;
  }

  // Sets what up() and down() say.
  void allow(Seconds p);
  // The nearest layer from k on, or back, in front of which the link there takes at most p.
  int up(int k, int at) const {
    const int row = positions[at].row;
    return row < 0 ? k : allowed_up[row][k];
  }
  int down(int k, int at) const {
    const int row = positions[at].row;
    return row < 0 ? k : allowed_down[row][k];
  }

  std::vector<Block> blocks;                                 // behind those in front of them
  std::vector<int> roots;                                    // blocks
  std::vector<Position> positions;                           // of all blocks
  std::vector<std::vector<Seconds>> link_total, link_worst;  // [row][layer behind]
  std::vector<std::vector<int>> allowed_up, allowed_down;    // [row][layer], as up() and down()

 private:
  void add_blocks(const Orders& orders);
  int link_row(int from, int to);
  const std::vector<std::vector<Move>>& moves_of(int c);

  const ChainProblem& chain_;
  CostTable* table_;
  Shared& shared_;
  const int layers_;
  std::map<std::pair<int, int>, int> rows_;  // of the link tables
};

}  // namespace motley::pipeline
